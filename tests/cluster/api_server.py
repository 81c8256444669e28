"""An HTTP double of the Kubernetes API: the few resources that hiera-train uses, kept in memory.

Each request has to be one that a real server would take: a known path and verb, known query parameters, and a
body that is valid for its schema (strictly: unknown fields are errors). What it would refuse, it refuses.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

VERSIONS = ("1.30", "1.37")
# Path prefix and plural of each resource, its kind, and the verbs that may be used on it.
RESOURCES = {
    ("/apis/batch/v1", "jobs"): ("batch/v1", "Job", {"create", "get", "list", "delete"}),
    ("/api/v1", "configmaps"): ("v1", "ConfigMap", {"create"}),
    ("/api/v1", "services"): ("v1", "Service", {"create"}),
    ("/api/v1", "persistentvolumeclaims"): ("v1", "PersistentVolumeClaim", {"create", "get"}),
    ("/api/v1", "pods"): ("v1", "Pod", {"list"}),
    ("/apis/monitoring.coreos.com/v1", "podmonitors"): (
        "monitoring.coreos.com/v1",
        "PodMonitor",
        {"create"},
    ),
}
PARAMETERS = {
    "create": set(),
    "get": set(),
    "list": {"labelSelector"},
    "delete": {"propagationPolicy"},
    "log": {"container", "follow"},
}
_PATH = re.compile(
    r"(?P<prefix>/api/v1|/apis/[a-z0-9.]+/v1)/namespaces/(?P<namespace>[a-z0-9-]+)/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[a-z0-9.-]+))?(?P<log>/log)?"
)


class ApiServer:
    """The server: `objects` by (plural, namespace, name), `logs` of pods, `requests` as "verb plural name"."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.logs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.mistakes: list[str] = []
        """What no client should have sent; tests expect none."""
        self.broken = ""
        """Plural of a resource that the server fails to create."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.handle(self, "GET")

            def do_POST(self) -> None:
                outer.handle(self, "POST")

            def do_DELETE(self) -> None:
                outer.handle(self, "DELETE")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()

    def write_kubeconfig(self, path: Path, namespace: str | None = "lab") -> None:
        """A kubeconfig whose current context is this server."""
        context = {"cluster": "double", "user": "me"}
        if namespace is not None:
            context["namespace"] = namespace
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "double",
            "clusters": [{"name": "double", "cluster": {"server": self.address}}],
            "users": [{"name": "me", "user": {"token": "secret"}}],
            "contexts": [{"name": "double", "context": context}],
        }
        path.write_text(yaml.safe_dump(content))

    def handle(self, request: BaseHTTPRequestHandler, method: str) -> None:
        """Answer one request."""
        length = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(length)) if length else None
        url = urlsplit(request.path)
        match = _PATH.fullmatch(url.path)
        known = RESOURCES.get((match["prefix"], match["plural"])) if match else None
        if match is None or known is None:
            self._wrong(request, f"no such path: {method} {url.path}")
            return
        api_version, kind, verbs = known
        verb = {"POST": "create", "DELETE": "delete"}.get(method, "get" if match["name"] else "list")
        if match["log"]:
            verb = "log"
        query = parse_qs(url.query)
        named = verb in ("get", "delete", "log")
        if (verb not in verbs and verb != "log") or named != bool(match["name"]):
            self._wrong(request, f"{verb} {url.path} is not allowed")
            return
        if set(query) - PARAMETERS[verb]:
            self._wrong(request, f"unknown parameters of {verb}: {sorted(query)}")
            return
        if request.headers.get("Authorization") != "Bearer secret":
            self._wrong(request, "no token")
            return
        self.requests.append(" ".join(filter(None, (verb, match["plural"], match["name"]))))
        key = (match["plural"], match["namespace"], match["name"] or "")
        if verb == "create":
            self._create(request, key, api_version, kind, body)
        elif verb == "list":
            self._list(request, key, kind, query)
        elif verb == "log":
            self._log(request, key, query)
        elif key not in self.objects:
            self._status(request, 404, "NotFound", f'{match["plural"]} "{key[2]}" not found')
        elif verb == "get":
            self._send(request, 200, self.objects[key])
        else:
            self._delete(request, key, query)

    def _create(self, request: Any, key: tuple[str, str, str], api_version: str, kind: str, body: Any) -> None:
        plural, namespace, _ = key
        if (body["apiVersion"], body["kind"]) != (api_version, kind):
            self._wrong(request, f"{body['apiVersion']} {body['kind']} sent to {plural}")
            return
        if body["metadata"].get("namespace", namespace) != namespace:
            self._wrong(request, "the namespace of the object does not match the request's")
            return
        if not api_version.startswith("monitoring"):
            for version in VERSIONS:
                try:
                    kubernetes_validate.validate(body, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    self._wrong(request, f"{kind} is not valid for {version}: {error.message}")
                    return
        name = body["metadata"]["name"]
        if plural == self.broken:
            self._status(request, 403, "Forbidden", f"{plural} is forbidden: quota exceeded\nmore")
            return
        if (plural, namespace, name) in self.objects:
            self._status(request, 409, "AlreadyExists", f'{plural} "{name}" already exists')
            return
        metadata = {**body["metadata"], "namespace": namespace, "uid": str(uuid.uuid4())}
        self.objects[plural, namespace, name] = {**body, "metadata": metadata, "status": {}}
        self._send(request, 201, self.objects[plural, namespace, name])

    def _list(self, request: Any, key: tuple[str, str, str], kind: str, query: dict[str, list[str]]) -> None:
        wanted = dict(part.split("=") for part in query.get("labelSelector", [""])[0].split(",") if part)
        items = [
            found
            for (plural, namespace, _), found in self.objects.items()
            if (plural, namespace) == key[:2] and wanted.items() <= found["metadata"].get("labels", {}).items()
        ]
        self._send(request, 200, {"kind": f"{kind}List", "apiVersion": "v1", "metadata": {}, "items": items})

    def _delete(self, request: Any, key: tuple[str, str, str], query: dict[str, list[str]]) -> None:
        if query.get("propagationPolicy") != ["Foreground"]:
            self._wrong(request, "a Job deleted so leaves its pods behind")
            return
        owner = self.objects.pop(key)["metadata"]["uid"]
        # The garbage collector.
        for other, found in list(self.objects.items()):
            if owner in [reference["uid"] for reference in found["metadata"].get("ownerReferences", [])]:
                del self.objects[other]
        self._send(request, 200, {"kind": "Status", "status": "Success"})

    def _log(self, request: Any, key: tuple[str, str, str], query: dict[str, list[str]]) -> None:
        if query.get("container") != ["train"] or key[2] not in self.logs:
            self._status(request, 404, "NotFound", "no such container")
            return
        request.send_response(200)
        request.send_header("Content-Type", "text/plain")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        text = self.logs[key[2]]
        # Chunks that end anywhere, also inside of a character.
        for start in range(0, len(text), 7):
            chunk = text[start : start + 7]
            request.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        request.wfile.write(b"0\r\n\r\n")

    def _wrong(self, request: Any, message: str) -> None:
        self.mistakes.append(message)
        self._status(request, 422, "Invalid", message)

    def _status(self, request: Any, code: int, reason: str, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self._send(request, code, {**status, "reason": reason, "message": message, "code": code})

    def _send(self, request: Any, code: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        request.send_response(code)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)
