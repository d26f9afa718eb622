"""A reward service on the loopback that answers by script."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RewardService:
    """Answers requests by the functions in `script`, the last one for all that follow."""

    def __init__(self):
        self.requests, self.script = [], [length_of_each]
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests.append(question)
                answer = service.script[min(len(service.requests), len(service.script)) - 1]
                answer(self, question)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


def send(handler, body: bytes, code: int = 200, headers=()):
    handler.send_response(code)
    for name, value in headers:
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def length_of_each(handler, question):
    send(handler, json.dumps({"rewards": [episode["length"] for episode in question["episodes"]]}).encode())


def answers(value, code=200):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return lambda handler, question: send(handler, body, code)
