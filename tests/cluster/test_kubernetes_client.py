"""submit, status, logs, list, cancel through torchx and the official client, against a double of the API."""

from __future__ import annotations

import pytest

pytest.importorskip("torchx", reason="torchx is optional")
pytest.importorskip("kubernetes", reason="the kubernetes client is optional")
pytest.importorskip("kubernetes_validate")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

from service.cli import main  # noqa: E402
from service.cluster import kubernetes  # noqa: E402
from service.errors import EXIT_FAILED  # noqa: E402
from tests.cluster.api_server import ApiServer  # noqa: E402
from tests.cluster.golden import job  # noqa: E402
from tests.cluster.readme import commands  # noqa: E402

HANDLE = "hiera_kubernetes://hiera-train/lab:hiera-base"


@pytest.fixture
def server(tmp_path, monkeypatch):
    double = ApiServer()
    double.write_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    # The client reads the variable when it is imported.
    from kubernetes.config import kube_config

    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield double
    double.close()
    assert double.mistakes == []


def submit(*more):
    return main(["submit", "--on", "kubernetes", "--config", "base", "--nodes", "2", *more])


def set_pod(server, index, phase, terminated=None, made="2026-01-01T00:00:00Z", name=None, **more):
    """A pod as the Job controller makes it from the template."""
    template = server.objects["jobs", "lab", "hiera-base"]["spec"]["template"]
    name = name or f"hiera-base-{index}-x"
    container = {"name": "train", "image": "i", "imageID": "i", "ready": False, "restartCount": 0}
    container["state"] = {"terminated": {"exitCode": terminated}} if terminated is not None else {}
    server.objects["pods", "lab", name] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "lab",
            "creationTimestamp": made,
            "labels": template["metadata"]["labels"],
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": "hiera-base",
                    "uid": server.objects["jobs", "lab", "hiera-base"]["metadata"]["uid"],
                }
            ],
        },
        "spec": template["spec"],
        "status": {"phase": phase, "containerStatuses": [container], **more},
    }


def test_submit_creates_what_render_prints_and_the_job_owns_it(server, capsys):
    assert submit("--set", "cluster.kubernetes.pod_monitor=true") == 0
    assert capsys.readouterr().out == f"{HANDLE}\n"
    wanted = kubernetes.manifests(job({"nodes": 2}, ("cluster.kubernetes.pod_monitor=true",)))
    uid = server.objects["jobs", "lab", "hiera-base"]["metadata"]["uid"]
    found = {o["kind"] + o["metadata"]["name"]: o for o in server.objects.values()}
    assert set(found) == {m["kind"] + m["metadata"]["name"] for m in wanted}
    for manifest in wanted:
        sent = found[manifest["kind"] + manifest["metadata"]["name"]]
        assert {k: v for k, v in sent.items() if k not in ("metadata", "status")} == {
            k: v for k, v in manifest.items() if k != "metadata"
        }
        owners = [owner["uid"] for owner in sent["metadata"].get("ownerReferences", [])]
        owned = manifest["kind"] not in ("Job", "PersistentVolumeClaim")
        assert owners == ([uid] if owned else [])


def test_claims_that_are_there_are_left_alone(server, capsys):
    claim = {"metadata": {"name": "hiera-data"}, "mine": True}
    server.objects["persistentvolumeclaims", "lab", "hiera-data"] = claim
    assert submit() == 0
    assert server.objects["persistentvolumeclaims", "lab", "hiera-data"] is claim
    assert "create persistentvolumeclaims" in server.requests


def test_a_second_job_of_the_name_is_refused(server, capsys):
    assert submit() == 0
    assert submit() == 78
    assert "a Job lab:hiera-base is there already" in capsys.readouterr().err
    assert submit("--name", "another") == 0


def test_a_refusal_is_one_line_and_leaves_nothing_half_made(server, capsys):
    server.broken = "services"
    assert submit() == EXIT_FAILED
    error = capsys.readouterr().err
    assert error == "hiera-train: error: Kubernetes: services is forbidden: quota exceeded\n"
    assert {key[0] for key in server.objects} == {"persistentvolumeclaims"}


def test_status_follows_the_job_and_its_pods(server, capsys):
    submit()
    capsys.readouterr()

    def status(code=0):
        assert main(["status", HANDLE]) == code
        return capsys.readouterr().out

    assert status().startswith(f"PENDING  {HANDLE}\n")
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient nvidia.com/gpu"}
    set_pod(server, 0, "Pending", conditions=[unscheduled])
    assert "pod 0 Pending (0/3 nodes: Insufficient nvidia.com/gpu)" in status()
    set_pod(server, 0, "Failed", terminated=75)
    set_pod(server, 0, "Running", made="2026-01-01T00:01:00Z", name="hiera-base-0-y")
    set_pod(server, 1, "Running")
    assert status() == f"RUNNING  {HANDLE}\n  pod 0 Running; pod 1 Running\n"
    set_pod(server, 1, "Failed", terminated=78)
    failure = "Container train for pod lab/hiera-base-1-x failed with exit code 78 matching FailJob rule at index 0"
    server.objects["jobs", "lab", "hiera-base"]["status"] = {
        "failed": 1,
        "conditions": [
            {"type": "FailureTarget", "status": "True", "message": failure},
            {"type": "Failed", "status": "True", "message": failure},
        ],
    }
    text = status(1)
    assert text.startswith(f"FAILED  {HANDLE}\n  Failed {failure}; pod 0")
    assert "pod 1 Failed, exit code 78" in text


@pytest.mark.parametrize(
    ("condition", "state"), [("Complete", "SUCCEEDED"), ("Failed", "FAILED"), ("Suspended", "PENDING")]
)
def test_list(server, capsys, condition, state):
    submit()
    server.objects["jobs", "lab", "hiera-base"]["status"] = {"conditions": [{"type": condition, "status": "True"}]}
    other = {"metadata": {"name": "x", "namespace": "lab", "labels": {}}, "spec": {"template": {"spec": {}}}}
    server.objects["jobs", "lab", "x"] = other
    capsys.readouterr()
    assert main(["list", "--on", "kubernetes"]) == 0
    assert capsys.readouterr().out == f"{state:<10} {HANDLE}\n"


def test_logs_are_of_the_newest_pod_of_a_node(server, capsys):
    submit()
    set_pod(server, 1, "Failed", name="hiera-base-1-old")
    set_pod(server, 1, "Running", name="hiera-base-1-new", made="2026-01-02T00:00:00Z")
    server.logs = {"hiera-base-1-new": "ein Löffel\nзавершено".encode(), "hiera-base-1-old": b"old\n"}
    capsys.readouterr()
    assert main(["logs", HANDLE, "--node", "1", "--follow"]) == 0
    assert capsys.readouterr().out == "ein Löffel\nзавершено"
    assert main(["logs", HANDLE]) == 78
    assert "has no pod 0" in capsys.readouterr().err


def test_cancel_deletes_all_but_the_claims(server, capsys):
    submit()
    set_pod(server, 0, "Running")
    assert main(["cancel", HANDLE]) == 0
    assert {key[0] for key in server.objects} == {"persistentvolumeclaims"}
    capsys.readouterr()
    assert main(["status", HANDLE]) == 78
    assert capsys.readouterr().err == f"hiera-train: error: {HANDLE}: no such job\n"


def test_the_namespace_of_the_configuration_wins(server, capsys):
    assert submit("--set", "cluster.kubernetes.namespace=research") == 0
    assert capsys.readouterr().out == "hiera_kubernetes://hiera-train/research:hiera-base\n"
    assert ("jobs", "research", "hiera-base") in server.objects


def test_a_server_that_is_not_there_is_one_line(server, capsys):
    server.close()
    assert main(["list", "--on", "kubernetes"]) == EXIT_FAILED
    error = capsys.readouterr().err
    assert error.startswith(f"hiera-train: error: Kubernetes: {server.address} cannot be reached")
    assert error.count("\n") == 1


def test_the_readme_s_commands(server, capsys, tmp_path):
    server.write_kubeconfig(tmp_path / "kubeconfig", namespace=None)
    install, submitted, *others = commands("Kubernetes", {})
    assert install == ["pip", "install", ".[torchx,kubernetes]"]
    assert main(submitted[1:]) == 0
    handle = capsys.readouterr().out.strip()
    template = server.objects["jobs", "default", "hiera-base"]["spec"]["template"]
    assert template["spec"]["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    server.objects["jobs", "lab", "hiera-base"] = server.objects["jobs", "default", "hiera-base"]
    set_pod(server, 0, "Running")
    del server.objects["jobs", "lab", "hiera-base"]
    server.objects["pods", "default", "hiera-base-0-x"] = server.objects.pop(("pods", "lab", "hiera-base-0-x"))
    server.logs = {"hiera-base-0-x": b"step 1\n"}
    assert [words[1] for words in others] == ["status", "logs", "cancel"]
    said = []
    for words in others:
        assert words[:1] + words[2:3] == ["hiera-train", handle]
        assert main(words[1:]) == 0
        said.append(capsys.readouterr().out)
    assert said == [f"RUNNING  {handle}\n  pod 0 Running\n", "step 1\n", ""]
    assert ("jobs", "default", "hiera-base") not in server.objects
