"""Mutual TLS with the certificates of kvctl tls init: what docs/security.md promises to a client of any language."""

import unittest

import grpc

from epochkv.v1 import kv_pb2, kv_pb2_grpc

from server import Server

TIMEOUT = 10


class TLSTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server(tls=True)
        cls.addClassCleanup(cls.server.close)
        cls.server.start()

    def put(self, channel):
        with channel:
            return kv_pb2_grpc.KVServiceStub(channel).Put(kv_pb2.PutRequest(key=b"k", value=b"v"), timeout=TIMEOUT)

    def test_a_client_with_a_certificate_is_served(self):
        self.assertGreater(self.put(self.server.channel()).epoch, 0)

    def test_others_are_refused(self):
        for name, channel in {
            "no certificate": self.server.channel(certificate=False),
            "plain text": grpc.insecure_channel(self.server.endpoint),
        }.items():
            with self.subTest(name), self.assertRaises(grpc.RpcError) as raised:
                self.put(channel)
            self.assertEqual(raised.exception.code(), grpc.StatusCode.UNAVAILABLE, name)


if __name__ == "__main__":
    unittest.main()
