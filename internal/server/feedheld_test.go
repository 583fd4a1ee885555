package server

import (
	"fmt"
	"strings"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// sentChanges is how many responses with changes were filled.
func (h *harness) sentChanges(t *testing.T) (n int) {
	t.Helper()
	for line := range strings.Lines(string(metricsOf(t, h))) {
		if _, count, ok := strings.Cut(line, "kvserver_feed_delivery_delay_seconds_count "); ok {
			_, _ = fmt.Sscan(count, &n)
		}
	}
	return n
}

// previousFrom is a watch from an epoch on that wants previous values.
func previousFrom(e uint64) *pb.CreateWatch {
	return &pb.CreateWatch{Values: pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e}}
}

// TestADeliveryKeepsWhatWasTakenForIt: what was delivered may need a second response, because of what was before. Streams have taken it all, until the
// second one is sent, although the first is smaller, and although nothing is left when their clients take that.
func TestADeliveryKeepsWhatWasTakenForIt(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		const first, second, streams = 70 << 10, 200_000, 6
		h := mustStart(t, with, func(c *config.Config) { c.Retention = time.Minute })
		e := h.put(t, "a", string(make([]byte, first)))
		both := &pb.BatchWriteRequest{Mutations: []*pb.Mutation{
			{Kind: pb.Mutation_KIND_DELETE, Key: []byte("a")}, {Kind: pb.Mutation_KIND_PUT, Key: []byte("b"), Value: make([]byte, second)},
		}}
		if _, err := h.kv.BatchWrite(testContext(t), both); err != nil {
			t.Fatal(err)
		}
		deaf := &harness{conn: h.dialDeaf(t)}
		var list [streams]*watcher
		for i := range list {
			list[i] = mustWatch(t, deaf, previousFrom(e))
		}
		eventually(t, "the first responses wait", func() bool { return h.sentChanges(t) == streams })
		undo := h.feed.responses.useUp()
		defer undo()
		held := func() int64 { return h.feed.responses.taken() - watchResponsesMore + streams*watchResponseBytesMin }
		if n := held(); n < streams*second {
			t.Errorf("%d bytes are taken while %d wait to be sent after the first response", n, streams*second)
		}
		for _, w := range list {
			for w.recv().GetChanges() == nil {
			}
		}
		eventually(t, "the second responses wait", func() bool { return h.sentChanges(t) == 2*streams })
		if n := held(); n < streams*second {
			t.Errorf("%d bytes are taken for second responses of %d", n, streams*second)
		}
		for _, w := range list {
			if got := len(w.recv().GetChanges().Commits[0].Events[0].Value); got != second {
				t.Errorf("the second response has a value of %d bytes", got)
			}
		}
	})
}

// TestAResponseOfOneEventIsNoLargerThanWasTaken: the event, with what was before, has just as much as there is, or a little less, and another commit
// follows in the same delivery. A build with assertions says what a response had.
func TestAResponseOfOneEventIsNoLargerThanWasTaken(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		const limit, before = watchResponseBytes - watchResponseRest, 100_000
		h := mustStart(t, with, func(c *config.Config) { c.Retention = time.Minute })
		for _, less := range []int{0, 1, commitBytes - 1, commitBytes} {
			e := h.put(t, "a", string(make([]byte, before)))
			h.put(t, "a", string(make([]byte, limit-eventBytes-len("ua")-before-less)))
			last := h.put(t, "b", "x")
			w := mustWatch(t, h, previousFrom(e))
			for events := []int(nil); len(events) < 2; {
				r := w.recv()
				if n := r.SizeVT(); n > watchResponseBytes {
					t.Errorf("a response of %d bytes", n)
				}
				for _, c := range r.GetChanges().GetCommits() {
					events = append(events, len(c.Events))
				}
				if len(events) == 2 && (r.GetChanges().Commits[0].Epoch != last || events[0] != 1) {
					t.Errorf("%d less: %d events, and epoch %d in the last response", less, events, r.GetChanges().Commits[0].Epoch)
				}
			}
			w.cancel()
		}
	})
}

// TestAChangeThatIsLargeWithWhatWasBeforeWaitsForRoom: also if neither is large alone.
func TestAChangeThatIsLargeWithWhatWasBeforeWaitsForRoom(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		for name, test := range map[string]struct {
			before, after int
			used          bool // nothing is left of the share, but the least of each
		}{
			"much is left": {before: 100_000, after: 200_000},
			"none is left": {before: 100_000, after: 10_000, used: true},
		} {
			t.Run(name, func(t *testing.T) {
				h := mustStart(t, with, func(c *config.Config) { c.Retention = time.Minute })
				h.put(t, "a", string(make([]byte, test.before)))
				e := h.get(t, "a").Epoch
				h.put(t, "a", string(make([]byte, test.after)))
				if test.used {
					defer h.feed.responses.useUp()()
				}
				w := mustWatch(t, &harness{conn: h.dialDeaf(t)}, previousFrom(e))
				eventually(t, "the response waits", func() bool { return h.sentChanges(t) == 1 })
				if n := h.admission.words[shareWatches].word.Load() & admissionBytes; int(n) < test.before+test.after {
					t.Errorf("there are %d bytes of room for %d", n, test.before+test.after)
				}
				r := w.recv()
				for r.GetChanges() == nil {
					r = w.recv()
				}
				if e := r.GetChanges().Commits[0].Events[0]; len(e.PreviousValue) != test.before || len(e.Value) != test.after {
					t.Errorf("%d bytes came, and %d that were before", len(e.Value), len(e.PreviousValue))
				}
			})
		}
	})
}

// TestPartsOfWalksFitTheLeastResponses: of deletions, of keys alone, and of a bulk load with what was before. And LOADED events of long ranges wait for room.
func TestPartsOfWalksFitTheLeastResponses(t *testing.T) {
	h := mustStart(t, retaining)
	const loaded = 200
	first := h.put(t, "first", "")
	large, err := h.bulk(t, loaded, 10_000, true)
	if err != nil {
		t.Fatal(err)
	}
	small, err := h.bulk(t, loaded, 100, true)
	if err != nil {
		t.Fatal(err)
	}
	middle, end := large.Epoch, small.Epoch
	var ranges []*pb.KeyRange
	for i := range watchRangesMax {
		key := fmt.Sprintf("key-%05d", i)
		ranges = append(ranges, &pb.KeyRange{Start: []byte(key + strings.Repeat("a", 500)), End: []byte(key + strings.Repeat("b", 500))})
	}
	defer h.feed.responses.useUp()()
	keysOnly := pb.WatchValues_WATCH_VALUES_NONE
	for name, create := range map[string]*pb.CreateWatch{
		"keys":     {Start: &pb.CreateWatch_Snapshot{Snapshot: &pb.WatchSnapshot{}}, Values: keysOnly},
		"snapshot": {Start: &pb.CreateWatch_Snapshot{Snapshot: &pb.WatchSnapshot{}}},
		"load":     {Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: middle}, Values: pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS, ExpandLoads: true},
		"loaded":   {Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: first}, Ranges: ranges},
	} {
		t.Run(name, func(t *testing.T) {
			w := mustWatch(t, h, create)
			for ended := false; !ended; {
				r := w.recv()
				most := int(watchResponseBytesMin)
				if name == "loaded" {
					most += watchRangesMax * 1000
				}
				if n := r.SizeVT(); n > most {
					t.Errorf("a response has %d bytes", n)
				}
				ended = r.GetSnapshot().GetEnd()
				for _, c := range r.GetChanges().GetCommits() {
					ended = c.End && c.Epoch == end
				}
			}
			w.cancel()
		})
	}
}
