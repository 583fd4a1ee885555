package epochkvv1

import (
	"bytes"
	"fmt"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/epochkv/epochkv/internal/testseed"
)

// manyChanges is a response with so many commits, as a watch that catches up gets it.
func manyChanges(commits int) *WatchResponse {
	var all WatchChanges
	for i := range commits {
		c := &ChangedCommit{Epoch: uint64(i + 1<<20), Time: &timestamppb.Timestamp{Seconds: 1 << 31, Nanos: int32(i)}, Origin: CommitOrigin_COMMIT_ORIGIN_CLIENT, End: true, Lagging: true}
		for j := range 1 + i%3/2 {
			c.Events = append(c.Events, &ChangeEvent{Kind: EventKind_EVENT_KIND_SET, Key: fmt.Appendf(nil, "%08d.%08d", i, j), Value: bytes.Repeat([]byte("v"), 100)})
		}
		all.Commits = append(all.Commits, c)
	}
	return &WatchResponse{WatchId: 1, Body: &WatchResponse_Changes{Changes: &all}, ResumeToken: bytes.Repeat([]byte("t"), 40)}
}

// sameAsGenerated compares what a response becomes with what generated code makes of it.
func sameAsGenerated(t *testing.T, data []byte) {
	t.Helper()
	var ours, theirs WatchResponse
	want := theirs.UnmarshalVT(data)
	if err := ours.unmarshalResponse(data); (err == nil) != (want == nil) {
		t.Fatalf("%x: error %v, want %v", data, err, want)
	}
	if want == nil && !proto.Equal(&ours, &theirs) {
		t.Fatalf("%x became\n%v, want\n%v", data, &ours, &theirs)
	}
}

// TestChangesAreDecodedAsGeneratedCodeDoes, and with little memory those that a server sends.
func TestChangesAreDecodedAsGeneratedCodeDoes(t *testing.T) {
	testseed.SkipUnderRace(t)
	full := &ChangeEvent{
		Kind: EventKind_EVENT_KIND_LOADED, Key: []byte("k"), Value: []byte("v"), PreviousValue: []byte{}, PreviousUnavailable: true,
		LeaseId: 1 << 63, ExpiresAtMs: -1, EndKey: []byte("l"),
	}
	for name, c := range map[string]struct {
		response *WatchResponse
		shared   bool
	}{
		"many commits":  {manyChanges(1000), true},
		"every field":   {&WatchResponse{Body: &WatchResponse_Changes{Changes: &WatchChanges{Commits: []*ChangedCommit{{Events: []*ChangeEvent{full, {}, full}}}}}}, true},
		"no commit":     {&WatchResponse{Body: &WatchResponse_Changes{Changes: &WatchChanges{}}}, true},
		"an empty one":  {&WatchResponse{Body: &WatchResponse_Changes{Changes: &WatchChanges{Commits: []*ChangedCommit{{}}}}}, true},
		"progress":      {&WatchResponse{WatchId: 7, Body: &WatchResponse_Progress{Progress: &WatchProgress{Epoch: 9}}, ResumeToken: []byte("t")}, false},
		"nothing":       {&WatchResponse{}, false},
		"an odd origin": {&WatchResponse{Body: &WatchResponse_Changes{Changes: &WatchChanges{Commits: []*ChangedCommit{{Origin: -1}}}}}, true},
	} {
		data, err := c.response.MarshalVT()
		if err != nil {
			t.Fatal(err)
		}
		sameAsGenerated(t, data)
		if shared := new(WatchResponse).unmarshalChanges(data); shared != c.shared {
			t.Errorf("%s: decoded here %v, want %v", name, shared, c.shared)
		}
		for n := range min(len(data), 300) { // cut off, and with a byte too many
			sameAsGenerated(t, data[:n])
			sameAsGenerated(t, append(bytes.Clone(data[:n]), data[n:]...))
			sameAsGenerated(t, append(append(bytes.Clone(data[:n]), 0x1a), data[n:]...))
		}
		sameAsGenerated(t, append(bytes.Clone(data), data...)) // fields that come twice
	}
}

// TestAKeptValueKeepsNoResponse: key and value of an event have memory of their own.
func TestAKeptValueKeepsNoResponse(t *testing.T) {
	data, _ := manyChanges(10).MarshalVT()
	var r WatchResponse
	if !r.unmarshalChanges(data) {
		t.Fatal("not decoded here")
	}
	e := r.GetChanges().Commits[3].Events[0]
	if most := len(e.Key) + len(e.Value) + 64; cap(e.Key) != len(e.Key) || cap(e.Value) > most {
		t.Errorf("a key of %d bytes has %d, a value of %d bytes has %d", len(e.Key), cap(e.Key), len(e.Value), cap(e.Value))
	}
	value := bytes.Clone(e.Value)
	clear(data)
	if _ = append(e.Key, "more than the key"...); !bytes.Equal(e.Value, value) {
		t.Error("the value is in the memory of the response, or of the key")
	}
}

// TestChangesTakeOnePieceOfMemoryForEachEvent, and a list for a commit with several.
func TestChangesTakeOnePieceOfMemoryForEachEvent(t *testing.T) {
	data, _ := manyChanges(1000).MarshalVT()
	var r WatchResponse
	_ = r.UnmarshalVT(data)
	want := 0
	for _, c := range r.GetChanges().Commits {
		want += len(c.Events)
		if len(c.Events) > 1 {
			want++
		}
	}
	got := testing.AllocsPerRun(10, func() {
		var r WatchResponse
		if err := r.unmarshalResponse(data); err != nil {
			t.Fatal(err)
		}
	})
	if most := float64(want + 20); got > most {
		t.Errorf("%.0f pieces of memory, want at most %.0f", got, most)
	}
}

func FuzzChanges(f *testing.F) {
	for _, n := range []int{0, 1, 5} {
		data, _ := manyChanges(n).MarshalVT()
		f.Add(data)
	}
	f.Fuzz(sameAsGenerated)
}

func BenchmarkChanges(b *testing.B) {
	data, err := manyChanges(1000).MarshalVT()
	if err != nil {
		b.Fatal(err)
	}
	for name, decode := range map[string]func() error{
		"decoder=codec": func() error {
			return NewCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, new(WatchResponse))
		},
		"decoder=generated": func() error { return new(WatchResponse).UnmarshalVT(data) },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for n := 0; n < b.N; n += 1000 { // one operation is a commit
				if err := decode(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
