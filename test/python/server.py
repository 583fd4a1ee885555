"""Runs the real kvserver for the tests."""

import os
import signal
import socket
import subprocess
import tempfile
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

START_SECONDS_MAX = 20


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A kvserver on a directory of its own, which survives kill and start."""

    def __init__(self, tls=False):
        self.binary = os.environ["KVSERVER"]
        self.dir = tempfile.TemporaryDirectory(prefix="epochkv-python-")
        self.tls = os.path.join(self.dir.name, "tls") if tls else None
        if tls:
            kvctl = os.path.join(os.path.dirname(self.binary), "kvctl")
            subprocess.run([kvctl, "tls", "init", self.tls], check=True, stdout=subprocess.DEVNULL)
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.process = None
        self.log = open(os.path.join(self.dir.name, "server.log"), "ab")

    def start(self):
        self.process = subprocess.Popen(
            [
                self.binary,
                "--data-dir", os.path.join(self.dir.name, "data"),
                "--listen", self.endpoint,
                "--http", "",
                "--memory", "256MiB",
            ] + self.tls_options(),
            stdout=self.log,
            stderr=self.log,
        )
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.serving():
                return
            time.sleep(0.05)
        self.log.flush()
        with open(self.log.name, encoding="utf-8") as log:
            raise RuntimeError("the server did not start:\n" + log.read())

    def tls_options(self):
        if self.tls is None:
            return []
        return [
            "--tls-cert", os.path.join(self.tls, "server.crt"),
            "--tls-key", os.path.join(self.tls, "server.key"),
            "--tls-client-ca", os.path.join(self.tls, "ca.crt"),
            "--tls-client-auth", "require",
        ]

    def channel(self, certificate=True):
        """A channel to the server, over TLS if it speaks TLS, with the client's certificate or without."""
        if self.tls is None:
            return grpc.insecure_channel(self.endpoint)

        def read(name):
            with open(os.path.join(self.tls, name), "rb") as file:
                return file.read()

        pair = (read("client.key"), read("client.crt")) if certificate else (None, None)
        return grpc.secure_channel(self.endpoint, grpc.ssl_channel_credentials(read("ca.crt"), *pair))

    def serving(self):
        with self.channel() as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
            except grpc.RpcError:
                return False
            return answer.status == health_pb2.HealthCheckResponse.SERVING

    def kill(self):
        """Ends the server as a power cut would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        """Ends the server in order, and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=START_SECONDS_MAX)

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()
        self.dir.cleanup()
