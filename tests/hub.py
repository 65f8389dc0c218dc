"""A fake Hugging Face hub with the requests that upload and download need."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from conftest import ROOT

COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """Repositories as {name: {path: content}}, served on a free port."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.tokens: set[str] = set()
        self.user = "me"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value: object, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json")

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.tokens.add(self.headers.get("Authorization", ""))
        parts = unquote(self.path.split("?")[0]).strip("/").split("/")
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization') or self.server.user}/{asked['name']}"
            known = name in self.server.repositories
            self.server.repositories.setdefault(name, {})
            answer = {"url": f"{self.server.url}/{name}", "name": name, "id": name}
            self.answer_json(answer, 409 if known else 200)
        elif parts[:2] == ["api", "validate-yaml"]:
            self.answer_json({"errors": [], "warnings": []})
        elif parts[4:5] == ["preupload"]:
            regular = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            files = [{"path": file["path"], **regular} for file in json.loads(body)["files"]]
            self.answer_json({"files": files})
        elif parts[4:5] == ["commit"]:
            name = "/".join(parts[2:4])
            self.store_files(name, body.decode())
            url = f"{self.server.url}/{name}/commit/{COMMIT}"
            self.answer_json({"success": True, "commitOid": COMMIT, "commitUrl": url})
        else:
            self.answer(404)

    def store_files(self, name: str, commit: str) -> None:
        """Store the files of a commit, one JSON object per line, in a repository."""
        for line in map(json.loads, commit.splitlines()):
            if line["key"] == "file":
                file = line["value"]
                self.server.repositories[name][file["path"]] = base64.b64decode(file["content"])

    def do_GET(self) -> None:  # noqa: N802
        parts = unquote(self.path.split("?")[0]).strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if name not in self.server.repositories:
            return self.answer(404, X_Error_Code="RepoNotFound")
        files = self.server.repositories[name]
        if parts[0] == "api":
            siblings = [{"rfilename": path} for path in files]
            return self.answer_json({"id": name, "sha": COMMIT, "siblings": siblings})
        content = files.get("/".join(parts[4:]))
        if content is None:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        tag = hashlib.sha256(content).hexdigest()
        return self.answer(200, content, X_Repo_Commit=COMMIT, ETag=f'"{tag}"')

    do_HEAD = do_GET


def command(
    module: str, flags: str, hub: Hub | str, cwd: Path, token: str = "dummy"
) -> subprocess.CompletedProcess:
    """Run a command as a process, because the client reads its settings on import."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub if isinstance(hub, str) else hub.url}
    environment |= {
        "HF_HOME": str(cwd / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "5",
    }
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*", "no_proxy": "*"}
    environment |= {"HF_TOKEN": token} if token else {}
    what = [str(ROOT / module)] if module.endswith(".py") else ["-m", f"cleanrl_utils.{module}"]
    words = [sys.executable, *what, *flags.split()]
    return subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200
    )
