"""Writes that are sent again and executed once: what docs/exactly-once.md promises to a client of any language."""

import os
import time
import unittest

import grpc

from epochkv.v1 import kv_pb2, kv_pb2_grpc, transactions_pb2, transactions_pb2_grpc

from server import Server

TIMEOUT = 10


def uuid7():
    """A UUID of version 7 (RFC 9562): 48 bits of milliseconds, and 74 random bits. Python has uuid.uuid7 since 3.14."""
    b = bytearray((time.time_ns() // 1_000_000).to_bytes(6, "big") + os.urandom(10))
    b[6] = 0x70 | b[6] & 0x0F
    b[8] = 0x80 | b[8] & 0x3F
    return bytes(b)


class ExactlyOnceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)
        cls.server.start()

    def setUp(self):
        channel = grpc.insecure_channel(self.server.endpoint)
        self.addCleanup(channel.close)
        self.kv = kv_pb2_grpc.KVServiceStub(channel)
        self.transactions = transactions_pb2_grpc.TransactionServiceStub(channel)

    def increment(self, key, request_id):
        request = kv_pb2.InvokeRequest(request_id=request_id)
        request.invocation.key = key
        request.invocation.increment.delta = 1
        request.invocation.return_new = True
        return self.kv.Invoke(request, timeout=TIMEOUT)

    def outcome(self, request_id, fence=False):
        return self.transactions.GetOutcome(transactions_pb2.GetOutcomeRequest(request_id=request_id, fence=fence), timeout=TIMEOUT)

    def test_attempts_have_one_effect_and_one_answer(self):
        request_id = uuid7()
        first = self.increment(b"n", request_id)
        again = self.increment(b"n", request_id)  # as if the first answer had been lost
        self.assertFalse(first.deduplicated)
        self.assertTrue(again.deduplicated)
        self.assertEqual((again.epoch, again.result.new), (first.epoch, first.result.new))
        self.assertEqual(self.kv.Get(kv_pb2.GetRequest(key=b"n"), timeout=TIMEOUT).value, b"1")
        self.assertEqual(self.outcome(request_id).epoch, first.epoch)

    def test_a_lost_attempt_can_be_fenced_off(self):
        request_id = uuid7()
        self.assertEqual(self.outcome(request_id).state, transactions_pb2.OUTCOME_STATE_NOT_APPLIED)
        self.assertEqual(self.outcome(request_id, fence=True).state, transactions_pb2.OUTCOME_STATE_CANCELLED)
        with self.assertRaises(grpc.RpcError) as late:
            self.increment(b"fenced", request_id)
        self.assertEqual(late.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
        self.assertFalse(self.kv.Get(kv_pb2.GetRequest(key=b"fenced"), timeout=TIMEOUT).found)

    def test_an_id_belongs_to_one_request(self):
        request_id = uuid7()
        self.increment(b"one", request_id)
        with self.assertRaises(grpc.RpcError) as other:
            self.increment(b"another", request_id)
        self.assertEqual(other.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)


if __name__ == "__main__":
    unittest.main()
