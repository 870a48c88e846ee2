"""A page in a browser, of another origin than the server: Chromium, without a window, asks the server first whether the
page may (a preflight), as it does for any request with a key and a JSON body. The server must have been started with
`--cors-origins`."""

import json
import queue
import subprocess
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from bench.correctness.clients.catalog import BROWSER
from bench.correctness.clients.checks import Checks, ServedModel

checks = Checks()
WAIT_S = 240
# The headers are those that OpenAI's package for JavaScript sends.
PAGE = """<!doctype html><script>
const headers = {"Content-Type": "application/json", "Authorization": "Bearer none", "X-Stainless-Lang": "js",
  "X-Stainless-Runtime": "browser:chrome", "X-Stainless-Retry-Count": "0", "X-Stainless-Timeout": "600"};
async function run() {
  const answer = await fetch(ASKED.url, {method: ASKED.method, headers, body: ASKED.body});
  let text = "", pieces = 0;
  for (const reader = answer.body.getReader(), decoder = new TextDecoder();;) {
    const {done, value} = await reader.read();
    if (done) break;
    text += decoder.decode(value, {stream: true});
    pieces += 1;
  }
  return {status: answer.status, text, pieces, request_id: answer.headers.get("x-request-id")};
}
run().catch(error => ({error: String(error)})).then(
  result => fetch("/result", {method: "POST", body: JSON.stringify(result)}));
</script>"""


def _from_a_page(url: str, method: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """The status and the text that a page gets for a request. Raises AssertionError with the browser's own reason."""
    results: queue.Queue[dict[str, Any]] = queue.Queue()
    asked = {"url": url, "method": method, "body": None if body is None else json.dumps(body)}
    page = PAGE.replace("<script>", f"<script>const ASKED = {json.dumps(asked)};\n").encode()

    class Origin(BaseHTTPRequestHandler):
        """The server of the page."""

        def do_GET(self) -> None:
            self._answer(page)

        def do_POST(self) -> None:
            results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer(b"")

        def _answer(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    assert BROWSER is not None, "there is no browser on this machine: install Chromium"
    with ThreadingHTTPServer(("127.0.0.1", 0), Origin) as server, tempfile.TemporaryDirectory() as profile:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        where = [f"--user-data-dir={profile}", "--remote-debugging-port=0", f"http://127.0.0.1:{server.server_port}/"]
        browser = subprocess.Popen([BROWSER, *flags, *where], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            result = results.get(timeout=WAIT_S)
        finally:
            browser.terminate()
            browser.wait(WAIT_S)
            server.shutdown()
    assert "error" not in result, f"{result['error']}: start the server with --cors-origins"
    return result


def _chat(at: ServedModel) -> dict[str, Any]:
    return {"model": at.model, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello!"}]}


@checks("a page asks for models")
def models(at: ServedModel) -> None:
    answer = _from_a_page(f"{at.v1}/models", "GET", None)
    assert answer["status"] == 200 and at.model in answer["text"], answer


@checks("a page chats")
def chat(at: ServedModel) -> None:
    answer = _from_a_page(f"{at.v1}/chat/completions", "POST", _chat(at))
    assert answer["status"] == 200 and json.loads(answer["text"])["choices"], answer


@checks("a page streams, and sees the request's id")
def stream(at: ServedModel) -> None:
    answer = _from_a_page(f"{at.v1}/chat/completions", "POST", _chat(at) | {"stream": True})
    assert answer["status"] == 200 and answer["text"].endswith("data: [DONE]\n\n"), answer
    assert answer["pieces"] > 1 and answer["request_id"], answer


@checks("a page reads an error")
def error(at: ServedModel) -> None:
    answer = _from_a_page(f"{at.v1}/chat/completions", "POST", _chat(at) | {"temperature": 9})
    assert answer["status"] == 400 and "temperature" in answer["text"], answer
