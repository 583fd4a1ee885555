package server

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
)

// fill writes keys 000 to n-1 with values that tell them apart.
func (h *harness) fill(t testing.TB, n int) {
	t.Helper()
	for i := range n {
		h.put(t, fmt.Sprintf("%03d", i), fmt.Sprintf("value-%03d", i))
	}
}

func (h *harness) scan(t testing.TB, r *pb.ScanRequest) []*pb.ScanResponse {
	t.Helper()
	stream, err := h.kv.Scan(testContext(t), r)
	if err != nil {
		t.Fatal(err)
	}
	return mustRecvAll(t, stream)
}

func keysOf(pages []*pb.ScanResponse) (out []string) {
	for _, p := range pages {
		for _, e := range p.Entries {
			out = append(out, string(e.Key))
		}
	}
	return out
}

func numbered(from, to int) (out []string) {
	for i := from; i < to; i++ {
		out = append(out, fmt.Sprintf("%03d", i))
	}
	return out
}

func reversed(s []string) []string {
	slices.Reverse(s)
	return s
}

func TestScanReturnsTheRangeInOrder(t *testing.T) {
	h := mustStart(t)
	h.fill(t, 100)
	b := func(s string) []byte { return []byte(s) }
	for name, row := range map[string]struct {
		request *pb.ScanRequest
		want    []string
	}{
		"all":               {&pb.ScanRequest{}, numbered(0, 100)},
		"reverse":           {&pb.ScanRequest{Reverse: true}, reversed(numbered(0, 100))},
		"bounds":            {&pb.ScanRequest{Range: &pb.KeyRange{Start: b("010"), End: b("020")}}, numbered(10, 20)},
		"bounds, reverse":   {&pb.ScanRequest{Range: &pb.KeyRange{Start: b("010"), End: b("020")}, Reverse: true}, reversed(numbered(10, 20))},
		"prefix":            {&pb.ScanRequest{Range: &pb.KeyRange{Prefix: b("03")}}, numbered(30, 40)},
		"prefix, reverse":   {&pb.ScanRequest{Range: &pb.KeyRange{Prefix: b("03")}, Reverse: true}, reversed(numbered(30, 40))},
		"prefix of ff":      {&pb.ScanRequest{Range: &pb.KeyRange{Prefix: b("\xff\xff")}}, nil},
		"from":              {&pb.ScanRequest{Range: &pb.KeyRange{Start: b("095")}}, numbered(95, 100)},
		"until":             {&pb.ScanRequest{Range: &pb.KeyRange{End: b("005")}}, numbered(0, 5)},
		"empty":             {&pb.ScanRequest{Range: &pb.KeyRange{Start: b("5"), End: b("5")}}, nil},
		"limit":             {&pb.ScanRequest{Limit: 7}, numbered(0, 7)},
		"limit, reverse":    {&pb.ScanRequest{Limit: 7, Reverse: true}, reversed(numbered(93, 100))},
		"tiny pages":        {&pb.ScanRequest{PageBytes: 1}, numbered(0, 100)},
		"pages of a few":    {&pb.ScanRequest{PageBytes: 50, Reverse: true}, reversed(numbered(0, 100))},
		"keys only":         {&pb.ScanRequest{KeysOnly: true}, numbered(0, 100)},
		"pages beyond most": {&pb.ScanRequest{PageBytes: 1 << 31}, numbered(0, 100)},
	} {
		pages := h.scan(t, row.request)
		if got := keysOf(pages); !slices.Equal(got, row.want) {
			t.Errorf("%s: got %v", name, got)
		}
		for _, p := range pages {
			if p.ReadEpoch != 100 || p.Count != uint64(len(p.Entries)) {
				t.Errorf("%s: a page of %d entries says %d at %d", name, len(p.Entries), p.Count, p.ReadEpoch)
			}
			for _, e := range p.Entries {
				if want := "value-" + string(e.Key); !row.request.KeysOnly && string(e.Value) != want || row.request.KeysOnly && len(e.Value) != 0 || e.Epoch == 0 {
					t.Errorf("%s: entry %v", name, e)
				}
			}
		}
		for tokens, wanted := range []func(last, limited bool) bool{
			func(bool, bool) bool { return false },
			func(last, _ bool) bool { return !last },
			func(last, limited bool) bool { return !last || limited },
		} {
			row.request.Tokens = pb.ResumeTokens(tokens)
			pages := h.scan(t, row.request)
			for i, p := range pages {
				if want := wanted(i == len(pages)-1, row.request.Limit != 0); (len(p.ResumeToken) > 0) != want {
					t.Errorf("%s: with tokens %v page %d of %d should have one: %v", name, row.request.Tokens, i, len(pages), want)
				}
			}
		}
	}
}

func TestPagesAreBounded(t *testing.T) {
	h := mustStart(t)
	value := bytes.Repeat([]byte("v"), 100<<10)
	for i := range 60 {
		if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: fmt.Append(nil, i), Value: value, Durability: pb.Durability_DURABILITY_ASYNC}); err != nil {
			t.Fatal(err)
		}
	}
	for asked, most := range map[uint32]int{0: scanPageBytesDefault, 300 << 10: 300 << 10, 1 << 30: scanPageBytesMax} {
		pages, entries := h.scan(t, &pb.ScanRequest{PageBytes: asked}), 0
		for i, p := range pages {
			size := 0
			for _, e := range p.Entries {
				size += len(e.Key) + len(e.Value)
			}
			entries += len(p.Entries)
			if size > max(most, len(value)+2) || size+len(value) < most*9/10 && i < len(pages)-1 {
				t.Errorf("asked for %d: page %d has %d bytes", asked, i, size)
			}
		}
		if entries != 60 {
			t.Errorf("asked for %d: %d entries", asked, entries)
		}
	}
}

func TestCountOnlyCounts(t *testing.T) {
	h := mustStart(t)
	h.fill(t, 100)
	pages := h.scan(t, &pb.ScanRequest{CountOnly: true, Range: &pb.KeyRange{Start: []byte("010")}})
	if len(pages) != 1 || pages[0].Count != 90 || len(pages[0].Entries) != 0 {
		t.Fatalf("got %v", pages)
	}
}

func TestTokenContinuesAfterItsPageAtTheSameEpoch(t *testing.T) {
	for _, reverse := range []bool{false, true} {
		h := mustStart(t)
		h.fill(t, 100)
		want := numbered(20, 90)
		if reverse {
			slices.Reverse(want)
		}
		r := &pb.ScanRequest{Range: &pb.KeyRange{Start: []byte("020"), End: []byte("090")}, Reverse: reverse, Limit: 11, PageBytes: 30, Tokens: pb.ResumeTokens_RESUME_TOKENS_ALL}
		var got []string
		for rounds := 0; ; rounds++ {
			pages := h.scan(t, r)
			got = append(got, keysOf(pages)...)
			last := pages[len(pages)-1]
			if last.ReadEpoch != 100 {
				t.Fatalf("resumed at %d", last.ReadEpoch)
			}
			if r.ResumeToken = last.ResumeToken; len(r.ResumeToken) == 0 {
				break
			}
			// What is written in between must not be seen, and the collector must not take away
			// what is.
			for i := 0; i < 100; i += 7 {
				h.put(t, fmt.Sprintf("%03d", i), "later")
			}
			h.put(t, fmt.Sprintf("050-%d", rounds), "new")
			time.Sleep(30 * time.Millisecond)
		}
		if !slices.Equal(got, want) {
			t.Errorf("reverse %v: got %v", reverse, got)
		}
	}
}

func TestTokenIsRefusedOnceItsTimeIsOver(t *testing.T) {
	inTimeOf(t, time.Second, func(ttl time.Duration) error { return tokenEnds(t, ttl) })
}

// tokenEnds returns an error if the time of a token was over when its half was.
func tokenEnds(t *testing.T, ttl time.Duration) error {
	h := mustStart(t, func(c *config.Config) { c.SnapshotLeaseTTL = ttl })
	h.fill(t, 10)
	asked := time.Now()
	tok := h.scan(t, &pb.ScanRequest{Limit: 5, Tokens: pb.ResumeTokens_RESUME_TOKENS_ALL})[0].ResumeToken
	h.put(t, "000", "later")
	time.Sleep(ttl / 2)
	page, err := h.scanOnce(t, &pb.ScanRequest{ResumeToken: tok, Limit: 2})
	if err != nil {
		return tooLate(t, asked, ttl, err)
	}
	if got := keysOf([]*pb.ScanResponse{page}); !slices.Equal(got, numbered(5, 7)) {
		t.Fatalf("in time: %v", got)
	}
	eventually(t, "the token's epoch is gone", func() bool { return h.store.Stats().Snapshots.Leases == 0 })
	stream, err := h.kv.Scan(testContext(t), &pb.ScanRequest{ResumeToken: tok})
	if err == nil {
		_, err = stream.Recv()
	}
	failureOf(t, err).want(t, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE, "epoch", "oldest")
	newest := h.put(t, "005", "later")
	pages := h.scan(t, &pb.ScanRequest{ResumeToken: tok, ResumeAtNewest: true})
	if got := keysOf(pages); !slices.Equal(got, numbered(5, 10)) || pages[0].ReadEpoch != newest || string(pages[0].Entries[0].Value) != "later" {
		t.Errorf("at the newest epoch: %v at %d", got, pages[0].ReadEpoch)
	}
	return nil
}

// TestTokenOutlivesAScanThatWasReadToItsFirstPageOnly: the server has sent everything and ended the
// stream in order, which does not say that the client has read it.
func TestTokenOutlivesAScanThatWasReadToItsFirstPageOnly(t *testing.T) {
	h := mustStart(t)
	h.fill(t, 20)
	for name, pageBytes := range map[string]uint32{"two pages": 150, "many pages": 30} {
		ctx, cancel := context.WithCancel(testContext(t))
		stream, err := h.kv.Scan(ctx, &pb.ScanRequest{PageBytes: pageBytes, Tokens: pb.ResumeTokens_RESUME_TOKENS_INNER})
		if err != nil {
			t.Fatal(err)
		}
		first, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "the server is done", func() bool { return h.counters.streams.Load() == 0 })
		cancel()
		for i := range 20 {
			h.put(t, fmt.Sprintf("%03d", i), "later")
		}
		time.Sleep(300 * time.Millisecond) // the collector has run
		got := h.scan(t, &pb.ScanRequest{ResumeToken: first.ResumeToken})
		if want := numbered(len(first.Entries), 20); !slices.Equal(keysOf(got), want) || got[0].ReadEpoch != first.ReadEpoch {
			t.Errorf("%s: got %v", name, keysOf(got))
		}
	}
}

// TestLimitedScansNeverRunOutOfTokens: scans that ask for no token keep no snapshot lease, those
// that do share a hold if they read at one epoch, and with every place for holds taken they go
// on all the same, because the oldest gives way.
func TestLimitedScansNeverRunOutOfTokens(t *testing.T) {
	testseed.SkipUnderRace(t)
	h := mustStart(t)
	h.fill(t, 10)
	for i := range 50 {
		h.put(t, "000", fmt.Sprint(i)) // an epoch for each
		h.scan(t, &pb.ScanRequest{Limit: 5})
	}
	if n := h.store.Stats().Snapshots.Leases; n != 0 {
		t.Errorf("%d epochs are held by scans that asked for no token", n)
	}
	for range 50 {
		h.scan(t, &pb.ScanRequest{Limit: 5, Tokens: pb.ResumeTokens_RESUME_TOKENS_ALL})
	}
	eventually(t, "one epoch is held", func() bool { return h.counters.streams.Load() == 0 && h.store.Stats().Snapshots.Leases == 1 })

	session, err := h.store.Session()
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	for i := range h.store.Stats().Limits.SnapshotLeases {
		h.put(t, "000", fmt.Sprint(i))
		at, err := session.OpenSnapshot(0)
		if err != nil {
			t.Fatal(err)
		}
		h.store.LeaseSnapshot(at, "", time.Minute)
	}
	h.put(t, "000", "after")
	pages := h.scan(t, &pb.ScanRequest{Limit: 5, Tokens: pb.ResumeTokens_RESUME_TOKENS_ALL})
	if got := keysOf(pages); !slices.Equal(got, numbered(0, 5)) || len(pages[0].ResumeToken) == 0 {
		t.Errorf("with every place taken: %v", pages)
	}
	later := h.put(t, "001", "later")
	eventually(t, "the epoch of the scan has only its lease", func() bool { return uint64(h.store.LowWatermark()) >= later })
	if got := keysOf(h.scan(t, &pb.ScanRequest{ResumeToken: pages[0].ResumeToken})); !slices.Equal(got, numbered(5, 10)) {
		t.Errorf("at its own epoch: %v", got)
	}
	if got := keysOf(h.scan(t, &pb.ScanRequest{ResumeToken: pages[0].ResumeToken, ResumeAtNewest: true})); !slices.Equal(got, numbered(5, 10)) {
		t.Errorf("at the newest epoch: %v", got)
	}
}

func TestBrokenScanGoesOnWithTheTokenOfItsLastPage(t *testing.T) {
	h := mustStart(t)
	value := bytes.Repeat([]byte("v"), 64<<10)
	for i := range 100 {
		if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: fmt.Appendf(nil, "%03d", i), Value: value, Durability: pb.Durability_DURABILITY_ASYNC}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(testContext(t))
	stream, err := h.kv.Scan(ctx, &pb.ScanRequest{Tokens: pb.ResumeTokens_RESUME_TOKENS_INNER})
	if err != nil {
		t.Fatal(err)
	}
	first, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	eventually(t, "the scan ends", func() bool { return h.counters.streams.Load() == 0 })
	for i := range 100 {
		h.put(t, fmt.Sprintf("%03d", i), "later")
	}
	time.Sleep(250 * time.Millisecond) // the collector has run
	got := keysOf(h.scan(t, &pb.ScanRequest{ResumeToken: first.ResumeToken}))
	if want := numbered(len(first.Entries), 100); !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
}

func TestScanWithoutTokensTakesNoLease(t *testing.T) {
	h := mustStart(t)
	h.fill(t, 50)
	h.scan(t, &pb.ScanRequest{PageBytes: 1})
	if n := h.store.Stats().Snapshots.Leases; n != 0 {
		t.Errorf("%d epochs are held", n)
	}
}

func TestSlowScanHoldsOnePageAndEndsWithItsClient(t *testing.T) {
	h := mustStart(t)
	value := bytes.Repeat([]byte("v"), 64<<10)
	for i := range 300 { // 19 MiB, far more than the windows of a stream hold
		if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: fmt.Appendf(nil, "%03d", i), Value: value, Durability: pb.Durability_DURABILITY_ASYNC}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(testContext(t))
	stream, err := h.kv.Scan(ctx, &pb.ScanRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	if requests, size, _ := h.admission.inflight(); requests != 1 || size < 2*scanPageBytesDefault || size > 2*scanPageBytesDefault+64<<10 {
		t.Errorf("a scan counts as %d requests of %d bytes", requests, size)
	}
	if n := h.store.Stats().Snapshots.Snapshots; n != 1 {
		t.Errorf("a scan holds %d snapshots", n)
	}
	// Old pages and memtables go although the scan goes on: it holds versions, not memory.
	for range 3 {
		h.put(t, "other", "v")
		if err := h.store.Checkpoint(ctx); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "replaced pages are free", func() bool {
		h.put(t, "other", "v")
		return h.store.Checkpoint(ctx) == nil && h.store.Stats().Storage.Pages.Pending == 0
	})
	cancel()
	eventually(t, "the scan ends", func() bool { return h.counters.streams.Load() == 0 && h.store.Stats().Snapshots.Snapshots == 0 })
}

func TestDrainEndsAScanAfterItsPage(t *testing.T) {
	h := mustStart(t)
	value := bytes.Repeat([]byte("v"), 64<<10)
	for i := range 300 {
		if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: fmt.Appendf(nil, "%03d", i), Value: value, Durability: pb.Durability_DURABILITY_ASYNC}); err != nil {
			t.Fatal(err)
		}
	}
	stream, err := h.kv.Scan(testContext(t), &pb.ScanRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- h.stop() }()
	eventually(t, "draining", h.drain.active.Load)
	for err = error(nil); err == nil; {
		_, err = stream.Recv()
	}
	if err == io.EOF {
		t.Fatal("the scan ran to its end")
	}
	failureOf(t, err).want(t, codes.Unavailable, pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
}

// TestPagesOfTinyEntriesHaveABound: an entry costs memory whatever its size, so the bytes of a page
// bound its entries, too.
func TestPagesOfTinyEntriesHaveABound(t *testing.T) {
	h := mustStart(t)
	const all, pageBytes = 5000, 16 << 10
	batch := &pb.BatchWriteRequest{Durability: pb.Durability_DURABILITY_ASYNC}
	for i := range all {
		batch.Mutations = append(batch.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: []byte{byte(i >> 8), byte(i)}})
	}
	if _, err := h.kv.BatchWrite(testContext(t), batch); err != nil {
		t.Fatal(err)
	}
	stream, err := h.kv.Scan(testContext(t), &pb.ScanRequest{PageBytes: pageBytes})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, page := range mustRecvAll(t, stream) {
		n += len(page.Entries)
		if len(page.Entries) > pageBytes/scanEntryBytes {
			t.Errorf("a page of %d entries", len(page.Entries))
		}
	}
	if n != all {
		t.Errorf("%d entries of %d", n, all)
	}
}
