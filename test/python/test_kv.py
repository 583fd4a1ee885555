"""EpochKV from another language: nothing here but the .proto files and the usual gRPC packages."""

import queue
import time
import unittest

import grpc
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from epochkv.v1 import admin_pb2, admin_pb2_grpc, errors_pb2, kv_pb2, kv_pb2_grpc

from server import Server

TIMEOUT = 10
KEY_BYTES_MAX = 2048


def reason(name):
    """The stable string of an error reason. Asking the generated enum finds a misspelt one."""
    errors_pb2.ErrorReason.Value("ERROR_REASON_" + name)
    return name


class ServerTest(unittest.TestCase):
    """A server with an empty database per class."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)
        cls.server.start()

    def setUp(self):
        channel = grpc.insecure_channel(self.server.endpoint)
        self.addCleanup(channel.close)
        self.channel = channel
        self.kv = kv_pb2_grpc.KVServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)

    # The calls, with a deadline each.

    def put(self, key, value, **more):
        return self.kv.Put(kv_pb2.PutRequest(key=key, value=value, **more), timeout=TIMEOUT).epoch

    def get(self, key, epoch=0):
        return self.kv.Get(kv_pb2.GetRequest(key=key, snapshot_epoch=epoch), timeout=TIMEOUT)

    def pages(self, **request):
        return list(self.kv.Scan(kv_pb2.ScanRequest(**request), timeout=TIMEOUT))

    def scan(self, **request):
        return [entry for page in self.pages(**request) for entry in page.entries]

    def clear(self):
        self.kv.DeleteRange(kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange()), timeout=TIMEOUT)

    def assert_fails(self, code, name, call, *args, **kwargs):
        """The call fails with this code and exactly one ErrorInfo of this reason. Returns its metadata and all details by type."""
        with self.assertRaises(grpc.RpcError) as caught:
            call(*args, timeout=TIMEOUT, **kwargs)
        error = caught.exception
        self.assertEqual(error.code(), code, error.details())
        details = {}
        infos = 0
        for packed in rpc_status.from_call(error).details:
            for kind in (
                error_details_pb2.ErrorInfo, error_details_pb2.BadRequest,
                error_details_pb2.RetryInfo, error_details_pb2.PreconditionFailure,
            ):
                detail = kind()
                if packed.Unpack(detail):
                    details[kind] = detail
                    infos += kind is error_details_pb2.ErrorInfo
        self.assertEqual(infos, 1)
        info = details[error_details_pb2.ErrorInfo]
        self.assertEqual((info.domain, info.reason), ("epochkv", reason(name)))
        return dict(info.metadata), details


class TestReadsAndWrites(ServerTest):
    def test_a_value_comes_back_with_its_epoch(self):
        first = self.put(b"k\x00\xff", b"\x00one")
        second = self.put(b"k\x00\xff", b"", durability=kv_pb2.DURABILITY_ASYNC)
        self.assertEqual(second, first + 1)
        newest = self.get(b"k\x00\xff")
        self.assertEqual((newest.found, newest.value, newest.epoch), (True, b"", second))
        self.assertGreaterEqual(newest.read_epoch, second)

    def test_a_missing_key_is_an_answer(self):
        answer = self.get(b"missing")
        self.assertEqual((answer.found, answer.value, answer.epoch), (False, b"", 0))

    def test_delete(self):
        self.put(b"d", b"x")
        self.kv.Delete(kv_pb2.DeleteRequest(key=b"d"), timeout=TIMEOUT)
        self.assertFalse(self.get(b"d").found)

    def test_a_batch_is_one_epoch(self):
        self.put(b"batch/gone", b"x")
        epoch = self.kv.BatchWrite(kv_pb2.BatchWriteRequest(mutations=[
            kv_pb2.Mutation(kind=kv_pb2.Mutation.KIND_PUT, key=b"batch/b", value=b"2"),
            kv_pb2.Mutation(kind=kv_pb2.Mutation.KIND_PUT, key=b"batch/a", value=b"1"),
            kv_pb2.Mutation(kind=kv_pb2.Mutation.KIND_DELETE, key=b"batch/gone"),
        ]), timeout=TIMEOUT).epoch
        keys = [b"batch/a", b"batch/gone", b"batch/b", b"batch/a"]
        answer = self.kv.BatchGet(kv_pb2.BatchGetRequest(keys=keys), timeout=TIMEOUT)
        self.assertEqual([r.value for r in answer.results], [b"1", b"", b"2", b"1"])
        self.assertEqual([r.found for r in answer.results], [True, False, True, True])
        self.assertEqual({r.epoch for r in answer.results if r.found}, {epoch})

    def test_preconditions(self):
        key = b"conditional"

        def put(**condition):
            return kv_pb2.PutRequest(key=key, value=b"v", preconditions=[kv_pb2.Precondition(key=key, **condition)])

        epoch = self.kv.Put(put(exists=False), timeout=TIMEOUT).epoch
        epoch = self.kv.Put(put(epoch_equals=epoch), timeout=TIMEOUT).epoch
        self.kv.Put(put(value_equals=b"v"), timeout=TIMEOUT)
        self.kv.Put(put(exists=True), timeout=TIMEOUT)
        for name, condition in {
            "absent": {"exists": False}, "value_equals": {"value_equals": b"w"}, "epoch_equals": {"epoch_equals": epoch},
        }.items():
            with self.subTest(name):
                metadata, details = self.assert_fails(
                    grpc.StatusCode.FAILED_PRECONDITION, "PRECONDITION_FAILED", self.kv.Put, put(**condition))
                self.assertEqual((metadata["key"], metadata["condition"]), ("conditional", name))
                self.assertIn(error_details_pb2.PreconditionFailure, details)

    def test_pipeline_answers_every_request(self):
        requests = queue.SimpleQueue()
        count = 500
        for i in range(count):
            key = b"pipe/%d" % (i % 50)
            requests.put(kv_pb2.PipelineRequest(id=i, put=kv_pb2.PutRequest(key=key, value=b"%d" % i)))
        requests.put(kv_pb2.PipelineRequest(id=count, put=kv_pb2.PutRequest(key=b"")))
        requests.put(kv_pb2.PipelineRequest(id=count + 1, batch_get=kv_pb2.BatchGetRequest(keys=[b"missing"])))
        requests.put(None)
        answers = {a.id: a for a in self.kv.Pipeline(iter(requests.get, None), timeout=TIMEOUT)}
        self.assertEqual(sorted(answers), list(range(count + 2)))
        self.assertEqual(len({answers[i].put.epoch for i in range(count)}), count)
        self.assertEqual(answers[count].error.code, grpc.StatusCode.INVALID_ARGUMENT.value[0])
        info = error_details_pb2.ErrorInfo()
        self.assertTrue(answers[count].error.details[0].Unpack(info))
        self.assertEqual(info.reason, reason("KEY_EMPTY"))
        self.assertFalse(answers[count + 1].batch_get.results[0].found)
        for i in range(50):  # writes take effect in the order of sending
            self.assertEqual(self.get(b"pipe/%d" % i).value, b"%d" % (count - 50 + i))


class TestScans(ServerTest):
    def setUp(self):
        super().setUp()
        self.clear()
        self.kv.BatchWrite(kv_pb2.BatchWriteRequest(mutations=[
            kv_pb2.Mutation(kind=kv_pb2.Mutation.KIND_PUT, key=b"s/%03d" % i, value=b"v" * 100) for i in range(200)
        ]), timeout=TIMEOUT)

    def keys(self, **request):
        return [e.key for e in self.scan(**request)]

    def test_ranges_and_directions(self):
        self.assertEqual(len(self.keys()), 200)
        self.assertEqual(self.keys(range=kv_pb2.KeyRange(start=b"s/010", end=b"s/013")), [b"s/010", b"s/011", b"s/012"])
        self.assertEqual(self.keys(range=kv_pb2.KeyRange(prefix=b"s/19"), reverse=True, limit=2), [b"s/199", b"s/198"])

    def test_pages_are_bounded(self):
        pages = self.pages(page_bytes=1000)
        self.assertGreater(len(pages), 10)
        self.assertEqual(len({p.read_epoch for p in pages}), 1)
        self.assertEqual(sum(p.count for p in pages), 200)

    def test_keys_only_and_count_only(self):
        self.assertTrue(all(e.value == b"" for e in self.scan(keys_only=True)))
        pages = self.pages(count_only=True)
        self.assertEqual((sum(p.count for p in pages), sum(len(p.entries) for p in pages)), (200, 0))

    def test_a_token_continues_at_the_same_epoch(self):
        first = self.pages(limit=50, tokens=kv_pb2.RESUME_TOKENS_ALL)
        self.put(b"s/100", b"changed since")
        self.kv.Delete(kv_pb2.DeleteRequest(key=b"s/150"), timeout=TIMEOUT)
        rest = self.pages(resume_token=first[-1].resume_token)
        self.assertEqual({p.read_epoch for p in rest}, {first[0].read_epoch})
        entries = [e for p in rest for e in p.entries]
        self.assertEqual([e.key for e in entries], [b"s/%03d" % i for i in range(50, 200)])
        self.assertTrue(all(e.value == b"v" * 100 for e in entries))
        self.assertEqual(rest[-1].resume_token, b"")

    def test_delete_range_counts(self):
        request = kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(prefix=b"s/"), limit=150)
        answer = self.kv.DeleteRange(request, timeout=TIMEOUT)
        self.assertEqual((answer.deleted, answer.more), (150, True))
        answer = self.kv.DeleteRange(request, timeout=TIMEOUT)
        self.assertEqual((answer.deleted, answer.more), (50, False))
        self.assertEqual(self.scan(), [])


class TestErrors(ServerTest):
    def test_bad_input_names_its_field(self):
        bad = grpc.StatusCode.INVALID_ARGUMENT
        mutation = kv_pb2.Mutation(kind=kv_pb2.Mutation.KIND_PUT, key=b"twice")
        for name, call, request in (
            ("KEY_EMPTY", self.kv.Get, kv_pb2.GetRequest()),
            ("KEY_TOO_LARGE", self.kv.Put, kv_pb2.PutRequest(key=b"k" * (KEY_BYTES_MAX + 1))),
            ("VALUE_TOO_LARGE", self.kv.Put, kv_pb2.PutRequest(key=b"k", value=bytes((16 << 20) + 1))),
            ("BATCH_EMPTY", self.kv.BatchWrite, kv_pb2.BatchWriteRequest()),
            ("DUPLICATE_KEY", self.kv.BatchWrite, kv_pb2.BatchWriteRequest(mutations=[mutation, mutation])),
            ("INVALID_REQUEST", self.kv.BatchWrite, kv_pb2.BatchWriteRequest(mutations=[kv_pb2.Mutation(key=b"k")])),
            ("INVALID_RANGE", self.kv.DeleteRange, kv_pb2.DeleteRangeRequest()),
            ("INVALID_REQUEST", self.kv.Put, kv_pb2.PutRequest(key=b"k", durability=9)),
        ):
            with self.subTest(name):
                _, details = self.assert_fails(bad, name, call, request)
                self.assertIn(error_details_pb2.BadRequest, details)
        self.assertFalse(self.get(b"twice").found)

    def test_the_longest_key_and_an_empty_value_are_fine(self):
        key = b"k" * KEY_BYTES_MAX
        self.put(key, b"")
        self.assertTrue(self.get(key).found)

    def test_a_large_value(self):
        value = bytes(range(256)) * (16 << 12)
        options = [("grpc.max_receive_message_length", 20 << 20)]
        with grpc.insecure_channel(self.server.endpoint, options=options) as channel:
            kv = kv_pb2_grpc.KVServiceStub(channel)
            kv.Put(kv_pb2.PutRequest(key=b"large", value=value), timeout=TIMEOUT)
            self.assertEqual(kv.Get(kv_pb2.GetRequest(key=b"large"), timeout=TIMEOUT).value, value)

    def test_scans_refuse_nonsense(self):
        def run(**request):
            return lambda timeout: list(self.kv.Scan(kv_pb2.ScanRequest(**request), timeout=timeout))

        bad = grpc.StatusCode.INVALID_ARGUMENT
        self.assert_fails(bad, "INVALID_RANGE", run(range=kv_pb2.KeyRange(prefix=b"p", start=b"p")))
        self.assert_fails(bad, "INVALID_RESUME_TOKEN", run(resume_token=b"nonsense"))

    def test_an_epoch_to_come_cannot_be_read(self):
        self.assert_fails(
            grpc.StatusCode.OUT_OF_RANGE, "SNAPSHOT_IN_FUTURE", self.kv.Get,
            kv_pb2.GetRequest(key=b"k", snapshot_epoch=1 << 40))

    def test_an_epoch_that_nobody_keeps_is_gone(self):
        old = self.put(b"gone", b"1")
        for i in range(3):
            self.put(b"gone", b"%d" % i)
        metadata, _ = self.assert_fails(
            grpc.StatusCode.OUT_OF_RANGE, "SNAPSHOT_GONE", self.wait_until_gone, old)
        self.assertEqual(metadata["epoch"], str(old))

    def wait_until_gone(self, epoch, timeout):
        """Reads at an epoch until that fails: the horizon moves by a timer."""
        for _ in range(timeout * 20):
            self.kv.Get(kv_pb2.GetRequest(key=b"gone", snapshot_epoch=epoch), timeout=timeout)
            self.put(b"other", b"x")
            time.sleep(0.05)


class TestAdministration(ServerTest):
    def test_status(self):
        epoch = self.put(b"k", b"v")
        status = self.admin.Status(admin_pb2.StatusRequest(), timeout=TIMEOUT)
        self.assertGreaterEqual(status.epochs.visible, epoch)
        self.assertGreaterEqual(status.epochs.durable, epoch)
        self.assertEqual(status.health.state, admin_pb2.Health.STATE_SERVING)
        self.assertEqual(status.limits.key_bytes, KEY_BYTES_MAX)
        self.assertGreaterEqual(len(status.generations), 1)
        self.assertTrue(status.generations[-1].active)

    def test_reflection_lists_the_services(self):
        services = ProtoReflectionDescriptorDatabase(self.channel).get_services()
        for name in ("epochkv.v1.KVService", "epochkv.v1.AdminService", "grpc.health.v1.Health"):
            self.assertIn(name, services)


class TestRestarts(ServerTest):
    def test_nothing_acknowledged_is_lost(self):
        written = {}
        for round_number in range(3):
            for i in range(200):
                key, value = b"r%d/%d" % (round_number, i), b"value-%d" % i
                written[key] = (value, self.put(key, value))
            self.server.kill()
            self.server.start()
            found = {e.key: (e.value, e.epoch) for e in self.scan()}
            self.assertEqual(found, written)
        newest = max(epoch for _, epoch in written.values())
        self.assertGreater(self.put(b"after", b"x"), newest)

    def test_sigterm_ends_in_order(self):
        epoch = self.put(b"term", b"x", durability=kv_pb2.DURABILITY_ASYNC)
        self.assertEqual(self.server.stop(), 0)
        with self.assertRaises(grpc.RpcError) as caught:
            self.get(b"term")
        self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)
        self.server.start()
        self.assertEqual(self.get(b"term").epoch, epoch)
        self.kv.Delete(kv_pb2.DeleteRequest(key=b"term"), timeout=TIMEOUT)


if __name__ == "__main__":
    unittest.main()
