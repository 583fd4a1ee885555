package server

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

func TestWriteIsReadBackWithItsEpoch(t *testing.T) {
	h := mustStart(t)
	epoch := h.put(t, "k", "v")
	got := h.get(t, "k")
	if !got.Found || string(got.Value) != "v" || got.Epoch != epoch || got.ReadEpoch < epoch {
		t.Fatalf("got %v after writing at %d", got, epoch)
	}
	if got := h.get(t, "missing"); got.Found || len(got.Value) != 0 || got.Epoch != 0 {
		t.Fatalf("a missing key answers %v", got)
	}
	deleted, err := h.kv.Delete(testContext(t), &pb.DeleteRequest{Key: []byte("k")})
	if err != nil || deleted.Epoch <= epoch {
		t.Fatalf("delete: %v, %v", deleted, err)
	}
	if got := h.get(t, "k"); got.Found {
		t.Fatalf("a deleted key answers %v", got)
	}
}

func TestEmptyValueIsNotAMissingKey(t *testing.T) {
	h := mustStart(t)
	h.put(t, "k", "")
	if got := h.get(t, "k"); !got.Found || len(got.Value) != 0 {
		t.Fatalf("got %v", got)
	}
}

func TestBatchIsOneEpochAndAnswersInRequestOrder(t *testing.T) {
	h := mustStart(t)
	h.put(t, "gone", "x")
	out, err := h.kv.BatchWrite(testContext(t), &pb.BatchWriteRequest{Mutations: []*pb.Mutation{
		{Kind: pb.Mutation_KIND_PUT, Key: []byte("b"), Value: []byte("2")},
		{Kind: pb.Mutation_KIND_PUT, Key: []byte("a"), Value: []byte("1")},
		{Kind: pb.Mutation_KIND_DELETE, Key: []byte("gone")},
	}})
	if err != nil {
		t.Fatal(err)
	}
	got, err := h.kv.BatchGet(testContext(t), &pb.BatchGetRequest{Keys: [][]byte{[]byte("b"), []byte("gone"), []byte("a"), []byte("b")}})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"2", "", "1", "2"}
	for i, r := range got.Results {
		if string(r.Value) != want[i] || r.Found != (want[i] != "") || r.Found && r.Epoch != out.Epoch {
			t.Errorf("result %d is %v, want %q at %d", i, r, want[i], out.Epoch)
		}
	}
	if len(got.Results) != len(want) || got.ReadEpoch < out.Epoch {
		t.Errorf("%d results at %d", len(got.Results), got.ReadEpoch)
	}
}

func TestLargeBatchOfValuesOfAnySizeIsAnsweredWhole(t *testing.T) {
	h := mustStart(t)
	write, read := &pb.BatchWriteRequest{}, &pb.BatchGetRequest{}
	for i := range 500 {
		key := fmt.Appendf(nil, "%03d", i)
		read.Keys = append(read.Keys, key)
		if i%7 != 0 { // each seventh is missing
			size := []int{0, 1, 10, 100, 1000, 3000, 20_000, 30_000}[i*31%8]
			write.Mutations = append(write.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: key, Value: bytes.Repeat(key, size/3)})
		}
	}
	ctx := testContext(t)
	if _, err := h.kv.BatchWrite(ctx, write); err != nil {
		t.Fatal(err)
	}
	check := func(results []*pb.BatchGetResult) {
		t.Helper()
		next := 0
		for i, r := range results {
			if r.Found != (i%7 != 0) {
				t.Fatalf("key %d: found %v", i, r.Found)
			}
			if r.Found {
				if !bytes.Equal(r.Value, write.Mutations[next].Value) {
					t.Fatalf("key %d: %d bytes, want %d", i, len(r.Value), len(write.Mutations[next].Value))
				}
				next++
			}
		}
	}
	out, err := h.kv.BatchGet(ctx, read)
	if err != nil {
		t.Fatal(err)
	}
	check(out.Results)
	stream := h.pipeline(t, ctx)
	for range 2 { // the second time the answer's messages and buffers are those of the first
		mustSend(t, stream, &pb.PipelineRequest{Request: &pb.PipelineRequest_BatchGet{BatchGet: read}})
		check(mustRecv(t, stream).GetBatchGet().GetResults())
	}
}

func TestReadsAtANamedEpoch(t *testing.T) {
	h := mustStart(t, retaining)
	first := h.put(t, "k", "old")
	h.put(t, "k", "new")
	got, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: []byte("k"), SnapshotEpoch: first})
	if err != nil || string(got.Value) != "old" || got.ReadEpoch != first {
		t.Fatalf("got %v, %v", got, err)
	}
	both, err := h.kv.BatchGet(testContext(t), &pb.BatchGetRequest{Keys: [][]byte{[]byte("k")}, SnapshotEpoch: first})
	if err != nil || string(both.Results[0].Value) != "old" || both.ReadEpoch != first {
		t.Fatalf("got %v, %v", both, err)
	}
}

func TestPreconditionsGuardEveryKindOfWrite(t *testing.T) {
	h := mustStart(t)
	epoch := h.put(t, "k", "v")
	holds := []*pb.Precondition{
		{Key: []byte("k"), Condition: &pb.Precondition_Exists{Exists: true}},
		{Key: []byte("k"), Condition: &pb.Precondition_ValueEquals{ValueEquals: []byte("v")}},
		{Key: []byte("k"), Condition: &pb.Precondition_EpochEquals{EpochEquals: epoch}},
		{Key: []byte("other"), Condition: &pb.Precondition_Exists{Exists: false}},
	}
	fails := []*pb.Precondition{
		{Key: []byte("k"), Condition: &pb.Precondition_Exists{Exists: false}},
		{Key: []byte("k"), Condition: &pb.Precondition_ValueEquals{ValueEquals: []byte("w")}},
		{Key: []byte("k"), Condition: &pb.Precondition_EpochEquals{EpochEquals: epoch + 1}},
		{Key: []byte("other"), Condition: &pb.Precondition_Exists{Exists: true}},
	}
	ctx := testContext(t)
	for name, write := range map[string]func(p []*pb.Precondition) error{
		"put": func(p []*pb.Precondition) error {
			_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("x"), Preconditions: p})
			return err
		},
		"delete": func(p []*pb.Precondition) error {
			_, err := h.kv.Delete(ctx, &pb.DeleteRequest{Key: []byte("x"), Preconditions: p})
			return err
		},
		"batch": func(p []*pb.Precondition) error {
			_, err := h.kv.BatchWrite(ctx, &pb.BatchWriteRequest{Preconditions: p, Mutations: []*pb.Mutation{{Kind: pb.Mutation_KIND_PUT, Key: []byte("x")}}})
			return err
		},
		"range": func(p []*pb.Precondition) error {
			_, err := h.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Preconditions: p, Range: &pb.KeyRange{Prefix: []byte("x")}})
			return err
		},
	} {
		if err := write(holds); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for i := range fails {
			f := failureOf(t, write(append(holds[:i:i], fails[i])))
			if f.metadata["index"] != fmt.Sprint(i) || f.metadata["key"] != string(fails[i].Key) || f.subject != string(fails[i].Key) {
				t.Errorf("%s: failure %d is told as %+v", name, i, f)
			}
		}
	}
}

func TestDeleteRangeCountsAndGoesOnInParts(t *testing.T) {
	h := mustStart(t)
	for i := range 10 {
		h.put(t, fmt.Sprintf("k%d", i), "v")
	}
	ctx := testContext(t)
	out, err := h.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Range: &pb.KeyRange{Start: []byte("k2"), End: []byte("k8")}, Limit: 4})
	if err != nil || out.Deleted != 4 || !out.More || out.Epoch == 0 {
		t.Fatalf("first part: %v, %v", out, err)
	}
	out, err = h.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Range: &pb.KeyRange{Start: []byte("k2"), End: []byte("k8")}, Limit: 4})
	if err != nil || out.Deleted != 2 || out.More {
		t.Fatalf("second part: %v, %v", out, err)
	}
	out, err = h.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Range: &pb.KeyRange{Start: []byte("k2"), End: []byte("k8")}})
	if err != nil || out.Deleted != 0 || out.Epoch != 0 {
		t.Fatalf("nothing left: %v, %v", out, err)
	}
	out, err = h.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Range: &pb.KeyRange{}})
	if err != nil || out.Deleted != 4 {
		t.Fatalf("all that is left: %v, %v", out, err)
	}
}

func TestStatusShowsWhatTheServerDoes(t *testing.T) {
	h := mustStart(t)
	epoch := h.put(t, "k", "v")
	out, err := h.admin.Status(testContext(t), &pb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if out.Health.State != pb.Health_STATE_SERVING || out.Epochs.Visible != epoch || out.Sessions.Open != 1 || out.Limits.KeyBytes != 2048 ||
		out.Sizes.MemoryBudgetBytes != 256<<20 || out.Sizes.ResidentBytes == 0 || len(out.Generations) == 0 || out.Build.GoVersion == "" {
		t.Fatalf("got %v", out)
	}
}

// TestStatusFillsEveryField looks for fields that are never set: after some work, none is zero but
// those that stand for trouble that this server did not have.
func TestStatusFillsEveryField(t *testing.T) {
	quiet := map[string]bool{
		"health.cause": true, "history.term": true, "log_holders.owner": true, "log_holders.bytes": true, "log_holders.bytes_max": true, "log_holders.expires_in": true, "log_holders.yields": true, "health.conditions": true, "health.state": true, "build.version": true, "build.revision": true,
		"recovery.records": true, "recovery.bytes": true, "recovery.epoch": true, "recovery.torn_file": true, "recovery.torn_offset": true, "recovery.torn_bytes": true, "recovery.repaired": true,
		"activity.methods.failed": true, "activity.cache_hits": true, "activity.watches": true,
		"sessions.requests_in_flight": true, "sessions.bytes_in_flight": true,
		"tree.pending_bytes": true, "tree.free_bytes": true, "tree.pages.blobs": true, "tree.pages.indirection_table": true, "tree.bulk_loads": true,
		"tree.write_stalls": true, "tree.damaged_reads": true, "tree.dead_version_ratio": true, "tree.vacuumed_pages": true, "tree.vacuumed_versions": true,
	}
	h := mustStart(t)
	for i := range 100 {
		h.put(t, strconv.Itoa(i), strings.Repeat("v", 4000))
	}
	h.put(t, "large", strings.Repeat("v", 100_000))
	h.scan(t, &pb.ScanRequest{Limit: 3, Tokens: pb.ResumeTokens_RESUME_TOKENS_ALL}) // its token keeps an epoch readable
	h.talk(t).begin()
	if _, err := h.admin.Checkpoint(testContext(t), &pb.CheckpointRequest{}); err != nil {
		t.Fatal(err)
	}
	h.put(t, "k", "v")
	h.get(t, "1")
	out, err := h.admin.Status(testContext(t), &pb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range unset("", out.ProtoReflect()) {
		if !quiet[name] {
			t.Errorf("%s is not set", name)
		}
	}
}

// unset are the names of the fields of a message, and of those in it, that have their zero value.
// Durations count by what they are.
func unset(path string, m protoreflect.Message) (names []string) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		name := path + string(f.Name())
		switch {
		case f.Message() != nil && f.Message().FullName() == "google.protobuf.Duration":
		case !m.Has(f):
			names = append(names, name)
		case f.IsList() && f.Message() == nil: // numbers, of which any may be zero
		case f.IsList():
			for j := range m.Get(f).List().Len() {
				names = append(names, unset(name+".", m.Get(f).List().Get(j).Message())...)
			}
		case f.Message() != nil:
			names = append(names, unset(name+".", m.Get(f).Message())...)
		}
	}
	return names
}

func TestEveryKindOfReadWaitsForASyncWriteItReveals(t *testing.T) {
	for name, read := range map[string]func(h *harness) (revealed uint64){
		"get": func(h *harness) uint64 { return h.get(t, "k").Epoch },
		"batch get": func(h *harness) uint64 {
			out, err := h.kv.BatchGet(testContext(t), &pb.BatchGetRequest{Keys: [][]byte{[]byte("k")}})
			if err != nil {
				t.Fatal(err)
			}
			return out.Results[0].Epoch
		},
		"scan": func(h *harness) uint64 { return h.scan(t, &pb.ScanRequest{})[0].Entries[0].Epoch },
		"failed precondition": func(h *harness) uint64 {
			_, err := h.kv.Put(testContext(t), &pb.PutRequest{
				Key: []byte("x"), Preconditions: []*pb.Precondition{{Key: []byte("k"), Condition: &pb.Precondition_Exists{}}},
			})
			failureOf(t, err)
			return 1
		},
	} {
		h := mustStart(t)
		release := h.holdSyncs(t)
		done := make(chan error, 1)
		ctx := testContext(t)
		go func() {
			_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Durability: pb.Durability_DURABILITY_SYNC})
			done <- err
		}()
		eventually(t, "the write is visible", func() bool { return h.store.Visible() == 1 })
		if h.store.Durable() != 0 {
			t.Fatal("the write is durable already: the test proves nothing")
		}
		time.AfterFunc(20*time.Millisecond, release) // time enough for a read that does not wait
		if epoch := read(h); epoch != 1 || h.store.Durable() < 1 {
			t.Errorf("%s revealed epoch %d while %d was durable", name, epoch, h.store.Durable())
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
