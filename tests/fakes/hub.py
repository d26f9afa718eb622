"""A hub on the loopback device that speaks as much of the hub's protocol as the real client asks for."""

import hashlib
import json
import re
import threading
from base64 import b64decode
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

WRITER = "hf_writer"  # a token that may write
READER = "hf_reader"  # a token that may only read


@dataclass
class Repo:
    """Files by revision, and who may see them."""

    revisions: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    gated: bool = False
    private: bool = False

    def commit(self, revision: str) -> str:
        content = [(name, hashlib.sha1(data).hexdigest()) for name, data in sorted(self.revisions[revision].items())]
        return hashlib.sha1(repr((revision, content)).encode()).hexdigest()

    def files(self, revision: str) -> dict[str, bytes] | None:
        """By a branch's name or by its commit."""
        return next((f for name, f in self.revisions.items() if revision in (name, self.commit(name))), None)


class FakeHub:
    """The server: `repos` is its state, `requests` what it was asked, `lfs` which uploads it wants as large files."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.blobs: dict[str, bytes] = {}
        self.lfs = re.compile(r".*\.safetensors")
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 - names that the base class calls

    def _answer(self) -> None:
        hub, path = self.server_hub, unquote(urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        hub.requests.append(f"{self.command} {path}")
        routes = {
            r"GET /api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>.+))?": self._info,
            r"GET /api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)": self._tree,
            r"(GET|HEAD) /(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)": self._file,
            r"POST /api/repos/create": self._create,
            r"POST /api/validate-yaml": self._validate,
            r"POST /api/models/(?P<repo>[^/]+/[^/]+)/preupload/main": self._preupload,
            r"POST /(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch": self._batch,
            r"PUT /blobs/(?P<oid>\w+)": self._blob,
            r"POST /api/models/(?P<repo>[^/]+/[^/]+)/commit/main": self._commit,
        }
        for pattern, answer in routes.items():
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                named = match.groupdict()
                repo = hub.repos.get(named.get("repo", ""))
                if "repo" in named and (repo is None or (repo.private and not self._token)):
                    self._send(401, code="RepoNotFound")
                elif "repo" in named and self.command != "POST" and repo.gated and not self._token:
                    self._send(401, code="GatedRepo")
                elif self.command == "POST" and self._token != WRITER:
                    self._send(403 if self._token else 401, message="You don't have the rights")
                else:
                    answer(body=body, **({**named, "repo": repo} if repo else named))
                return
        self._send(404, code="RepoNotFound")

    @property
    def _token(self) -> str:
        return (self.headers.get("authorization") or "").removeprefix("Bearer ")

    def _info(self, repo: Repo, revision: str | None, body: bytes) -> None:
        revision = revision or "main"
        if repo.files(revision) is None:
            self._send(404, code="RevisionNotFound")
        else:
            self._send(200, {"id": "any/name", "sha": repo.commit(revision), "siblings": []})

    def _tree(self, repo: Repo, revision: str, body: bytes) -> None:
        files = repo.files(revision) or {}
        self._send(
            200,
            [{"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for n, d in files.items()],
        )

    def _file(self, repo: Repo, revision: str, name: str, body: bytes) -> None:
        data = (repo.files(revision) or {}).get(name)
        if data is None:
            self._send(404, code="EntryNotFound")
        else:
            self._send(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": revision})

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        known = name in self.server_hub.repos
        if not known:
            self.server_hub.repos[name] = Repo(private=asked.get("visibility") == "private")
        self._send(409 if known else 200, {"url": f"{self.server_hub.url}/{name}"})

    def _validate(self, body: bytes) -> None:
        """A card that begins with no mapping between two lines of dashes is refused."""
        parts = json.loads(body)["content"].split("---\n")
        is_card = len(parts) >= 3 and isinstance(yaml.safe_load(parts[1]), dict)
        problems = [] if is_card else [{"message": "empty or missing yaml metadata in repo card"}]
        self._send(200, {"errors": [], "warnings": problems})

    def _preupload(self, repo: Repo, body: bytes) -> None:
        def mode(path: str) -> str:
            return "lfs" if self.server_hub.lfs.fullmatch(path) else "regular"

        files = [file["path"] for file in json.loads(body)["files"]]
        self._send(200, {"files": [{"path": p, "uploadMode": mode(p), "shouldIgnore": False} for p in files]})

    def _batch(self, repo: Repo, body: bytes) -> None:
        def upload(oid: str) -> dict[str, dict[str, str]]:
            return {"upload": {"href": f"{self.server_hub.url}/blobs/{oid}"}}

        objects = json.loads(body)["objects"]
        self._send(200, {"transfer": "basic", "objects": [{**o, "actions": upload(o["oid"])} for o in objects]})

    def _blob(self, oid: str, body: bytes) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.server_hub.blobs[oid] = body
        self._send(200, {})

    def _commit(self, repo: Repo, body: bytes) -> None:
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                repo.revisions["main"][value["path"]] = b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                repo.revisions["main"][value["path"]] = self.server_hub.blobs[value["oid"]]
        sha = repo.commit("main")
        self._send(200, {"commitUrl": f"{self.server_hub.url}/any/name/commit/{sha}", "commitOid": sha})

    def _send(
        self,
        status: int,
        content: object = None,
        headers: dict[str, str] | None = None,
        *,
        code: str | None = None,
        message: str | None = None,
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps({} if content is None else content).encode()
        self.send_response(status)
        wanted = {"X-Error-Code": code, "X-Error-Message": message, "Content-Length": str(len(data)), **(headers or {})}
        for name, value in wanted.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
