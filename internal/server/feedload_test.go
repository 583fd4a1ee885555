package server

import (
	"fmt"
	"strings"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
)

// loadEvents receives the events of a commit until its last part, on a new stream after each response: the tokens continue
// inside of it.
func loadEvents(t *testing.T, h *harness, create *pb.CreateWatch) (all []string, parts int, token []byte) {
	t.Helper()
	for {
		w := mustWatch(t, h, create)
		m := w.recv()
		for m.GetChanges() == nil {
			m = w.recv()
		}
		w.cancel()
		c := m.GetChanges().Commits[0]
		for _, e := range c.Events {
			all = append(all, fmt.Sprintf("%d %v %s-%s %d %d/%v", c.Epoch, e.Kind, e.Key, e.EndKey, len(e.Value), len(e.PreviousValue), e.PreviousUnavailable))
		}
		if len(all) > 10_000 {
			t.Fatal("the commit does not end")
		}
		if parts++; c.End {
			return all, parts, m.ResumeToken
		}
		create.Start = &pb.CreateWatch_ResumeToken{ResumeToken: m.ResumeToken}
	}
}

// TestExpandedLoadsAreTheirEntries: a watch that expands loads gets each entry of a bulk load in its ranges once, in key order, as
// they were at the load's epoch, in parts that can be resumed; and then what came after it.
func TestExpandedLoadsAreTheirEntries(t *testing.T) {
	h := mustStart(t, retaining)
	const loaded, size = 2500, 30
	h.put(t, "key-00100", "12345")
	before := h.put(t, "other", "not loaded")
	load, err := h.bulk(t, loaded, size, true)
	if err != nil {
		t.Fatal(err)
	}
	at := load.GetEpoch()
	later := h.put(t, "key-00200", "later") // not what the load has set
	if _, err := h.kv.Delete(testContext(t), &pb.DeleteRequest{Key: []byte("key-00300")}); err != nil {
		t.Fatal(err)
	}
	ranges := []*pb.KeyRange{{End: []byte("key-01500")}, {Start: []byte("key-02000"), End: []byte("key-99")}}
	got, parts, token := loadEvents(t, h, &pb.CreateWatch{
		Ranges: ranges, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: before}, ExpandLoads: true,
		Values: pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS, Kinds: []pb.EventKind{pb.EventKind_EVENT_KIND_SET},
	})
	var want []string
	for i := range loaded {
		if i < 1500 || i >= 2000 {
			previous := 0
			if i == 100 {
				previous = 5
			}
			want = append(want, fmt.Sprintf("%d EVENT_KIND_SET key-%05d- %d %d/false", at, i, size, previous))
		}
	}
	mustEqualLists(t, got, want...)
	if parts < 2 {
		t.Errorf("%d parts", parts)
	}
	w := mustWatch(t, h, &pb.CreateWatch{
		Ranges: ranges, Start: &pb.CreateWatch_ResumeToken{ResumeToken: token}, Kinds: []pb.EventKind{pb.EventKind_EVENT_KIND_SET},
	})
	after, _ := w.events(1)
	mustEqualLists(t, after, fmt.Sprintf("%d S key-00200 later", later))
}

// interruptedLoad loads key-00000 to key-02499, at an epoch whose state is not readable any more, and interrupts a watch of a range that expands the load
// after the event of the last key. It returns how to begin that watch anew, and how to resume it.
func (h *harness) interruptedLoad(t *testing.T, r *pb.KeyRange) (whole, rest *pb.CreateWatch, at uint64, last string) {
	t.Helper()
	before := h.put(t, "other", "not loaded")
	if _, err := h.bulk(t, 2500, 1, true); err != nil {
		t.Fatal(err)
	}
	at = uint64(h.store.Visible())
	whole = &pb.CreateWatch{Ranges: []*pb.KeyRange{r}, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: before}, ExpandLoads: true}
	w := mustWatch(t, h, whole)
	m := w.recv()
	for m.GetChanges() == nil {
		m = w.recv()
	}
	w.cancel()
	events := m.GetChanges().Commits[0].Events
	last = string(events[len(events)-1].Key)
	rest = &pb.CreateWatch{Ranges: whole.Ranges, Start: &pb.CreateWatch_ResumeToken{ResumeToken: m.ResumeToken}, ExpandLoads: true}
	eventually(t, "no walk is open", func() bool { return h.admission.sessions.walks.held.Load() == 0 })
	for _, lease := range h.store.SnapshotLeases() { // of the walk, if it was interrupted
		h.store.EndSnapshotLease(lease.ID)
	}
	for uint64(h.store.LowWatermark()) <= at {
		h.put(t, "other", "again")
	}
	return whole, rest, at, last
}

// TestLoadsThatAreNotReadableComeAsLoaded: if the state after a load is not kept, the events say which keys it may have set, also
// for the rest of a load of which a part has come.
func TestLoadsThatAreNotReadableComeAsLoaded(t *testing.T) {
	h := mustStart(t)
	whole, rest, at, last := h.interruptedLoad(t, &pb.KeyRange{})
	resumed := mustWatch(t, h, rest)
	got, _ := resumed.loaded(at)
	mustEqualLists(t, got, fmt.Sprintf("%q-%q", last+"\x00", "key-02499\x00"))
	anew := mustWatch(t, h, whole)
	got, _ = anew.loaded(at)
	mustEqualLists(t, got, fmt.Sprintf("%q-%q", "key-00000", "key-02499\x00"))
	h.put(t, "z", "after it")
	for _, w := range []*watcher{resumed, anew} {
		for last := ""; !strings.Contains(last, " S z after it"); {
			next, _ := w.events(1)
			last = next[len(next)-1]
		}
	}
}

// TestALoadGoesOnAfterAWaitForRoom: a stream that waits for room for a large response executes requests meanwhile. One of them goes on with a load that is
// not readable any more.
func TestALoadGoesOnAfterAWaitForRoom(t *testing.T) {
	h := mustStart(t)
	_, rest, _, _ := h.interruptedLoad(t, prefixRange("key-"))
	const size = 3 << 20
	large := h.put(t, "large", string(make([]byte, size)))
	held := h.fillWatches()
	w := mustWatch(t, h, &pb.CreateWatch{WatchId: 1, Ranges: []*pb.KeyRange{prefixRange("large")}, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: large - 1}})
	w.recv()
	eventually(t, "the stream waits for room", h.admission.watches.isAwaited)
	rest.WatchId = 2
	w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: rest}})
	if m := w.recv(); m.WatchId != 2 || m.GetCreated() == nil {
		t.Fatal(m)
	}
	held.leave()
	for got := [3]bool{}; !got[1] || !got[2]; {
		m := w.recv()
		for _, c := range m.GetChanges().GetCommits() {
			if e := c.Events[0]; m.WatchId == 2 && e.Kind != pb.EventKind_EVENT_KIND_LOADED || m.WatchId == 1 && len(e.Value) != size {
				t.Fatalf("watch %d has %v", m.WatchId, e.Kind)
			}
			got[m.WatchId] = true
		}
	}
}

// loaded receives the LOADED events of a commit.
func (w *watcher) loaded(at uint64) (all []string, token []byte) {
	w.t.Helper()
	for {
		m := w.recv()
		for _, c := range m.GetChanges().GetCommits() {
			if c.Epoch != at || !c.End {
				w.t.Fatalf("commit %d with %d events, the first one %v", c.Epoch, len(c.Events), c.Events[0])
			}
			for _, e := range c.Events {
				if e.Kind != pb.EventKind_EVENT_KIND_LOADED {
					w.t.Fatalf("event %v", e)
				}
				all = append(all, fmt.Sprintf("%q-%q", e.Key, e.EndKey))
			}
			return all, m.ResumeToken
		}
	}
}

// TestOpenWatchesKeepLoadsReadable: without a retention, the state after a load is kept until a watch that expands it has read it.
func TestOpenWatchesKeepLoadsReadable(t *testing.T) {
	h := mustStart(t)
	w := mustWatch(t, h, &pb.CreateWatch{ExpandLoads: true})
	w.recv()
	if _, err := h.bulk(t, 10, 1, true); err != nil {
		t.Fatal(err)
	}
	at := h.store.Visible()
	x, err := h.store.Session()
	if err != nil {
		t.Fatal(err)
	}
	for h.store.LowWatermark() <= at {
		h.put(t, "key-00003", "overwritten")
	}
	for _, e := range []keys.Epoch{at - 1, at} {
		if _, err := x.OpenSnapshot(e); err != nil {
			t.Error(err)
		}
	}
	x.Close()
	got, _ := w.events(10)
	for i, e := range got[:10] {
		if want := fmt.Sprintf("%d S key-%05d v", at, i); e[:len(want)-1] != want[:len(want)-1] {
			t.Errorf("%q, want %q", e, want)
		}
	}
	w.cancel()
	expanding := &h.Server.feed.expanding // its watches are counted until its sender has ended
	eventually(t, "no watch expands loads", func() bool {
		expanding.mu.Lock()
		defer expanding.mu.Unlock()
		return expanding.count == 0
	})
	before := len(h.store.SnapshotLeases())
	if _, err := h.bulk(t, 10, 1, true); err != nil {
		t.Fatal(err)
	}
	if after := len(h.store.SnapshotLeases()); before == 0 || after > before {
		t.Errorf("%d leases after a load that no watch expands, %d before", after, before)
	}
}
