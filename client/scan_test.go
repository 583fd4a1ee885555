package client_test

import (
	"errors"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/client/clienttest"
)

// keysOf runs a scan to its end.
func keysOf(t *testing.T, c *client.Client, r client.Range, o client.ScanOptions) []string {
	t.Helper()
	var keys []string
	for e, err := range c.Scan(t.Context(), r, o) {
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, string(e.Key))
	}
	return keys
}

func TestScanGoesBothWaysWithinItsRange(t *testing.T) {
	_, c := start(t)
	fill(t, c, 100)
	forward := keysOf(t, c, client.Between([]byte("key-0010"), []byte("key-0020")), client.ScanOptions{PageBytes: 30})
	if len(forward) != 10 || forward[0] != "key-0010" || forward[9] != "key-0019" {
		t.Errorf("forward: %v", forward)
	}
	reverse := keysOf(t, c, client.Prefix([]byte("key-001")), client.ScanOptions{Reverse: true, Limit: 3, PageBytes: 1})
	if fmt.Sprint(reverse) != "[key-0019 key-0018 key-0017]" {
		t.Errorf("reverse: %v", reverse)
	}
	if all := keysOf(t, c, client.Range{}, client.ScanOptions{KeysOnly: true}); len(all) != 100 {
		t.Errorf("%d keys in all", len(all))
	}
}

func TestScanSurvivesBrokenConnections(t *testing.T) {
	for _, reverse := range []bool{false, true} {
		s, c := start(t)
		fill(t, c, 200)
		s.CutScansAfter(3)
		n := 0
		for e, err := range c.Scan(t.Context(), client.Range{}, client.ScanOptions{PageBytes: 100, Reverse: reverse, Limit: 150}) {
			if err != nil {
				t.Fatal(err)
			}
			at := n
			if reverse {
				at = 199 - n
			}
			if want := fmt.Sprintf("key-%04d", at); string(e.Key) != want {
				t.Fatalf("entry %d is %q, want %q", n, e.Key, want)
			}
			if n == 20 {
				mustPut(t, c, "key-0199x", "written after the scan began") // must stay invisible to it
			}
			n++
		}
		if n != 150 {
			t.Errorf("reverse %v: %d entries, want 150", reverse, n)
		}
		if calls := s.Calls("Scan"); calls < 5 {
			t.Errorf("only %d scans: the connection was not cut", calls)
		}
	}
}

func TestScanGivesUpWithoutProgress(t *testing.T) {
	s, c := start(t)
	fill(t, c, 10)
	broken := status.Error(codes.Unavailable, "connection reset")
	s.FailNext(broken, broken, broken, broken, broken)
	for e, err := range c.Scan(t.Context(), client.Range{}, client.ScanOptions{}) {
		if err == nil {
			t.Fatalf("got entry %q of a server that is down", e.Key)
		}
	}
	if calls := s.Calls("Scan"); calls != 4 {
		t.Errorf("%d attempts, want 4", calls)
	}
	s.FailNext(nil)
}

func TestScanIsNotRepeatedWithoutItsSnapshot(t *testing.T) {
	s, c := start(t)
	s.FailNext(clienttest.NewError(codes.OutOfRange, kvpb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE, "gone"))
	for _, err := range c.Scan(t.Context(), client.Range{}, client.ScanOptions{At: 1}) {
		if !errors.Is(err, client.ErrSnapshotGone) {
			t.Errorf("got %v", err)
		}
	}
	if calls := s.Calls("Scan"); calls != 1 {
		t.Errorf("%d attempts, want 1", calls)
	}
}

func TestScanMayBeLeftEarlyAndIteratedAgain(t *testing.T) {
	_, c := start(t)
	fill(t, c, 50)
	scan := c.Scan(t.Context(), client.Range{}, client.ScanOptions{PageBytes: 10})
	for range 2 {
		n := 0
		for e, err := range scan {
			if err != nil {
				t.Fatal(err)
			}
			if want := fmt.Sprintf("key-%04d", n); string(e.Key) != want {
				t.Fatalf("got %q, want %q", e.Key, want)
			}
			if n++; n == 20 {
				break
			}
		}
	}
}

func TestPagesMayBeIteratedAgain(t *testing.T) {
	_, c := start(t)
	fill(t, c, 50)
	pages := c.Pages(t.Context(), client.Range{}, client.ScanOptions{PageBytes: 100, Limit: 40})
	for range 2 {
		var n uint64
		for page, err := range pages {
			if err != nil {
				t.Fatal(err)
			}
			n += page.Count
		}
		if n != 40 {
			t.Errorf("%d entries, want 40", n)
		}
	}
}

func TestPagesCarryATokenToContinueWith(t *testing.T) {
	_, c := start(t)
	fill(t, c, 30)
	var token []byte
	var at client.Epoch
	for page, err := range c.Pages(t.Context(), client.Range{}, client.ScanOptions{Limit: 10, Tokens: true}) {
		if err != nil {
			t.Fatal(err)
		}
		token, at = page.ResumeToken, page.ReadEpoch
	}
	mustPut(t, c, "key-0015", "newer")
	rest := 0
	for page, err := range c.Pages(t.Context(), client.Range{}, client.ScanOptions{ResumeToken: token}) {
		if err != nil {
			t.Fatal(err)
		}
		rest += len(page.Entries)
		if page.ReadEpoch != at || page.ResumeToken != nil {
			t.Errorf("page at %d with token %x; the scan began at %d", page.ReadEpoch, page.ResumeToken, at)
		}
	}
	if rest != 20 {
		t.Errorf("%d entries after the token, want 20", rest)
	}
	rest = 0
	for page, err := range c.Pages(t.Context(), client.Range{}, client.ScanOptions{ResumeToken: token, ResumeAtNewest: true}) {
		if err != nil {
			t.Fatal(err)
		}
		rest += len(page.Entries)
		if page.ReadEpoch <= at {
			t.Errorf("page at %d; the scan began at %d", page.ReadEpoch, at)
		}
	}
	if rest != 20 {
		t.Errorf("%d entries after the token at the newest epoch, want 20", rest)
	}
}

func TestCountCountsOnTheServer(t *testing.T) {
	s, c := start(t)
	fill(t, c, 123)
	s.CutScansAfter(2)
	count, at, err := c.Count(t.Context(), client.Prefix([]byte("key-")), client.ScanOptions{PageBytes: 200})
	if err != nil || count != 123 || at != 1 {
		t.Errorf("%d at %d, %v", count, at, err)
	}
}
