"""The manifests: valid for several versions of Kubernetes, safe by default, and what k8s/ ships is the same."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from service.cluster import kubernetes, kustomize, presets
from service.config.load import load_config
from service.errors import UserError
from tests.cluster.golden import HOSTILE, KUBERNETES, job

ROOT = Path(__file__).parents[2]
VERSIONS = ("1.30", "1.37")


def validate(manifest):
    """Every field must be known and right, for two versions of Kubernetes; PodMonitor is not Kubernetes' own."""
    validator = pytest.importorskip("kubernetes_validate")
    if manifest["apiVersion"].startswith("monitoring.coreos.com/"):
        return
    for version in VERSIONS:
        validator.validate(manifest, version, strict=True)


def by_kind(manifests):
    return {manifest["kind"]: manifest for manifest in manifests}


def manifests_of(*settings, environment=None, **arguments):
    return by_kind(kubernetes.manifests(job(arguments, settings, environment)))


def pod_of(*settings, **arguments):
    return manifests_of(*settings, **arguments)["Job"]["spec"]["template"]["spec"]


def expand(text):
    """Kubernetes' own rule for values of variables that name no other variable."""
    return text.replace("$$", "$")


@pytest.mark.parametrize("name", KUBERNETES)
def test_manifests_are_valid(name):
    arguments, settings = KUBERNETES[name]
    manifests = kubernetes.manifests(job(arguments, settings, {"A": HOSTILE}))
    for manifest in manifests:
        validate(manifest)
    assert list(yaml.safe_load_all(kubernetes.render(job(arguments, settings, {"A": HOSTILE})))) == manifests


def test_the_validation_can_fail():
    validator = pytest.importorskip("kubernetes_validate")
    manifest = manifests_of()["Job"]
    manifest["spec"]["template"]["spec"]["containers"][0]["no_such_field"] = 1
    with pytest.raises(validator.ValidationError):
        validate(manifest)


def test_every_preset_is_valid():
    for node in presets.NODES:
        for network in presets.NETWORKS:
            settings = (f"cluster.node_type={node}", f"cluster.network={network}")
            for manifest in kubernetes.manifests(job({"nodes": 2}, settings)):
                validate(manifest)


def test_nodes_meet_at_the_first_pod():
    found = manifests_of(nodes=4)
    spec = found["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    service = found["Service"]
    pod = spec["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    # A pod of an Indexed Job is called <job>-<index>, and is found below the Service its subdomain names.
    assert pod["subdomain"] == service["metadata"]["name"]
    variables = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
    host, _, port = variables["HIERA_RDZV_ENDPOINT"].partition(":")
    assert host == f"{found['Job']['metadata']['name']}-0.{pod['subdomain']}"
    assert int(port) in [item["port"] for item in service["spec"]["ports"]]
    assert variables["HIERA_NNODES"] == "4"


def test_exit_codes_decide():
    rules = manifests_of(nodes=2)["Job"]["spec"]["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("FailJob", [70, 78]),
        ("Ignore", None),
        ("Ignore", [75]),
    ]
    assert rules[1]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_nothing_is_allowed_that_is_not_needed():
    pod = pod_of()
    container = pod["containers"][0]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    written = {"/tmp", "/dev/shm", "/runs", "/cache"}
    assert {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")} == written
    (shm,) = (volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"


def test_a_pod_has_time_to_save():
    assert pod_of("runtime.grace_seconds=300")["terminationGracePeriodSeconds"] > 300


def test_the_run_is_resolved_for_the_pod(tmp_path):
    text = manifests_of("run.name=a")["ConfigMap"]["data"]["run.yaml"]
    (tmp_path / "run.yaml").write_text(text)
    config = load_config(tmp_path / "run.yaml")
    assert (str(config.run.dir), str(config.data.path), str(config.runtime.cache_dir)) == (
        "/runs/a",
        "/data",
        "/cache",
    )


def test_environment_values_are_not_expanded():
    pod = manifests_of(environment={"A": HOSTILE, "B": "$(HOME)"})["Job"]["spec"]["template"]["spec"]
    values = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
    assert expand(values["A"]) == HOSTILE
    assert values["B"] == "$$(HOME)"


def test_each_pod_has_its_own_compile_cache():
    pod = pod_of("cluster.kubernetes.cache_claim=c")
    (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "cache")
    assert mount["subPathExpr"] == "$(HIERA_NODE_RANK)"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Run_1.5", "run-1-5"), ("1st", "run-1st"), ("a" * 80, "a" * 52), ("-x-", "x"), ("ä b", "b")],
)
def test_names_of_objects(name, expected):
    assert kubernetes.object_name(name) == expected


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ({"seeds": (1, 2)}, (), "only Slurm has job arrays"),
        ({"after": "5"}, (), "only Slurm has job arrays and dependencies"),
        ({}, ("cluster.kubernetes.data_claim=null",), "data.path: null although"),
        ({"name": "+++"}, (), "holds no letter or digit"),
        ({}, ("cluster.kubernetes.volumes={a: /x, b: /x/}",), "volumes: /x holds several claims; give each"),
        ({}, ("cluster.kubernetes.volumes={a: /x/../runs}",), "volumes: /runs holds several claims; give each"),
    ],
)
def test_what_kubernetes_has_not(arguments, settings, message):
    with pytest.raises(UserError, match=message):
        kubernetes.manifests(job(arguments, settings))


# What is shipped in k8s/ and slurm/


def test_shipped_files_are_what_the_renderers_give():
    """Renew with `python -m service.cluster.kustomize .` and read the difference."""
    expected = kustomize.files()
    for name, text in expected.items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, name
    shipped = {str(path.relative_to(ROOT)) for path in (ROOT / "k8s").rglob("*") if path.is_file()}
    assert shipped == {name for name in expected if name.startswith("k8s/")}


@pytest.mark.parametrize("name", ["", *kustomize.OVERLAYS])
def test_kustomize_makes_of_them_what_the_renderer_gives(name):
    """Whichever kubectl is here; tests/system has one of its own."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    assert_kustomize_gives_the_rendering(kubectl, name)


def assert_kustomize_gives_the_rendering(kubectl, name):
    directory = ROOT / "k8s" / (f"overlays/{name}" if name else "")
    done = subprocess.run([kubectl, "kustomize", directory], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = list(yaml.safe_load_all(done.stdout))
    wanted = kubernetes.manifests(kustomize.overlay_job(name) if name else kustomize.base_job())
    if name == "cpu-smoke":
        assert {manifest["kind"] for manifest in found} == {"ConfigMap", "Service", "Job"}
    key = kustomize._key
    assert {key(manifest): manifest for manifest in found} == {key(manifest): manifest for manifest in wanted}
    for manifest in found:
        validate(manifest)


def test_patches_have_every_kind_of_change():
    old = {"a": 1, "b/c": {"d~": [1, 2]}, "e": [{"f": 1}], "g": 0}
    new = {"a": 1, "b/c": {"d~": [1]}, "e": [{"f": 2}], "h": 3}
    assert kustomize.difference(old, new) == [
        {"op": "replace", "path": "/b~1c/d~0", "value": [1]},
        {"op": "replace", "path": "/e/0/f", "value": 2},
        {"op": "remove", "path": "/g"},
        {"op": "add", "path": "/h", "value": 3},
    ]


def test_the_pod_that_fills_the_data_claim_is_valid():
    page = (ROOT / "docs/clusters.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```yaml\n(apiVersion.*?)^```$", page, re.MULTILINE | re.DOTALL)
    pod = yaml.safe_load(text)
    validate(pod)
    settings = load_config("base").cluster.kubernetes
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == settings.data_claim
    assert pod["spec"]["securityContext"]["runAsUser"] == settings.run_as_user


def test_the_tables_of_presets_are_in_the_documentation():
    """Renew with `python -m service.cluster.presets`."""
    assert presets.markdown() in (ROOT / "docs/clusters.md").read_text(encoding="utf-8")
