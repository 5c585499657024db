"""A proxy between a client and the gateway that passes every byte on and remembers who asked what."""

import http.client
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

CALL_ID = re.compile(rb'"(?:id|call_id)":"((?:call|toolu)_[0-9a-f]+)"')
HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "upgrade", "te", "trailer"}


class Exchange:
    """One request and what came of it."""

    def __init__(self, path, headers, body):
        self.path, self.headers, self.body = path, headers, body
        self.status, self.session, self.mode, self.mints = None, None, None, []

    def step(self):
        """The request as `kvc-router identify` reads it."""
        headers = {}
        for name, value in self.headers:
            headers.setdefault(name.lower(), []).append(value)
        return {"path": self.path, "headers": headers, "body": json.loads(self.body), "mints": self.mints}


class Recorder:
    """Listens on a port of its own; `exchanges` holds the turns in order, `others` everything else."""

    def __init__(self, upstream):
        self.exchanges, self.others, lock = [], [], threading.Lock()
        recorder, target = self, urlsplit(upstream)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def serve(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                exchange = Exchange(self.path, list(self.headers.items()), body)
                turn = self.command == "POST" and self.path.startswith("/v1/")
                with lock:
                    (recorder.exchanges if turn else recorder.others).append(exchange)
                connection = http.client.HTTPConnection(target.hostname, target.port, timeout=60)
                try:
                    self.relay(connection, exchange)
                except (ConnectionError, http.client.HTTPException):
                    self.close_connection = True
                finally:
                    connection.close()

            def relay(self, connection, exchange):
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in exchange.headers:
                    if name.lower() not in HOP or name.lower() == "upgrade":
                        connection.putheader(name, value)
                if exchange.body:
                    connection.putheader("content-length", str(len(exchange.body)))
                connection.endheaders(exchange.body or None)
                answer = connection.getresponse()
                exchange.status = answer.status
                exchange.session, exchange.mode = answer.getheader("x-kvc-session"), answer.getheader("x-kvc-mode")
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in HOP:
                        self.send_header(name, value)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                seen = b""
                while piece := answer.read1(65536):
                    seen += piece
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")
                exchange.mints = list(dict.fromkeys(i.decode() for i in CALL_ID.findall(seen)))

            do_GET = do_POST = do_DELETE = do_PUT = serve

            def do_HEAD(self):
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
