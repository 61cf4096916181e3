"""A web service that gives each visitor a sandbox. Install: pip install .

    curl -b jar -c jar --data 'x = 41' localhost:8000
    curl -b jar -c jar --data 'x + 1' localhost:8000

Send Python code with POST. A cookie leads a visitor back to the same sandbox, with its variables
and files. One not used for IDLE seconds ends. GET says how many there are; Ctrl-C stops them all.
"""

import os
import secrets
import threading
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hutch import HutchError, NoCapacity, Sandbox

PORT, IDLE = int(os.environ.get("PORT", "8000")), float(os.environ.get("IDLE", "300"))
MAX_SANDBOXES, MAX_CODE, TIMEOUT = 100, 64 * 1024, 10
boxes: dict[str, Sandbox] = {}  # by the cookie of their visitor
lock = threading.RLock()


def count() -> int:
    with lock:  # and forget those that have ended
        live = {info.id for info in Sandbox.list()}
        for cookie in [cookie for cookie, box in boxes.items() if box.id not in live]:
            del boxes[cookie]
        return len(boxes)


def sandbox_of(cookie: str) -> tuple[str, Sandbox]:
    """The sandbox of a cookie that we gave out; for any other, a new one with a new cookie."""
    with lock:
        if count() >= MAX_SANDBOXES and cookie not in boxes:
            raise NoCapacity("too many visitors")
        if cookie not in boxes:
            cookie = secrets.token_urlsafe()
            boxes[cookie] = Sandbox.create(memory="256m", cpus=1, pids=64, idle=IDLE)
        return cookie, boxes[cookie]


def run(box: Sandbox, code: str) -> str:
    done = box.run_code(code, timeout=TIMEOUT)
    text = done.logs.stdout + done.logs.stderr + (done.text or "")
    if done.timed_out:
        return f"{text}stopped after {TIMEOUT} seconds"
    if done.error:  # an exception; or its Python crashed, or ran out of memory
        return f"{text}{done.error.name}: {done.error.value}"
    return text


class Handler(BaseHTTPRequestHandler):
    timeout = 30  # seconds without a byte from a client

    def do_GET(self) -> None:
        self.reply(200, f"sandboxes: {count()}")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_CODE:
            return self.reply(413, f"send at most {MAX_CODE} bytes of code")
        code = self.rfile.read(int(length)).decode(errors="replace")
        sent, cookie = SimpleCookie(self.headers.get("Cookie", "")).get("sandbox"), ""
        try:
            cookie, box = sandbox_of(sent.value if sent else "")
            self.reply(200, run(box, code), cookie)
        except HutchError as exc:  # no room for another sandbox, or this one ended just now
            self.reply(503, f"{exc}; try again", cookie)

    def reply(self, status: int, text: str, cookie: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        if cookie:
            self.send_header("Set-Cookie", f"sandbox={cookie}; HttpOnly; SameSite=Strict")
        self.end_headers()
        self.wfile.write(f"{text}\n".encode(errors="replace"))


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print(f"stopped; sandboxes that end now: {count()}")


if __name__ == "__main__":
    main()
