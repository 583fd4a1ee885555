package mvcc

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAnUnreadCutoffExecutesNoRequestTwice: a start cannot read the cut-off of request ids, in a store of the oldest feature level, which has no times of
// commits; the wall clock was set back meanwhile. The record of a request is dropped, and its id is from the future: it is not executed again once the page is
// readable, and new requests are executed.
func TestAnUnreadCutoffExecutesNoRequestTwice(t *testing.T) {
	fs := vfs.NewMem()
	o := tiny(fs)
	o.Storage.PageSize, o.Storage.StartPatience, o.Storage.FeatureLevel = 512, time.Millisecond, 1
	o.RequestWindow = 15 * time.Millisecond
	s := mustStart(t, o)
	for i := range 20 {
		mustPut(t, s, fmt.Sprint("filler ", i), strings.Repeat("v", 100))
	}
	x := mustSession(t, s)
	r := newRequest()
	if _, err := putOnce(t, x, r, "key", "first"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the record is dropped", func() bool {
		mustCheckpoint(t, s)
		out, err := x.Outcome(t.Context(), r)
		return err == nil && out.State == OutcomeExpired
	})
	x.Close()
	mustClose(t, s)

	intact := dataFile(t, fs)
	mustDamageLeafOf(t, fs, &o, cutoffKey[1:])
	damaged := dataFile(t, fs)
	o.WallClock = func() time.Time { return time.Now().Add(-time.Hour) }
	s = mustStart(t, o)
	defer func() { _ = s.Close() }()
	x = mustSession(t, s)
	defer x.Close()
	refused := func() error {
		t.Helper()
		_, err := putOnce(t, x, r, "key", "again")
		if v := get(t, s, "key", 0); v != "first" || err == nil {
			t.Fatalf("the second attempt: %v; the value is %s", err, v)
		}
		return err
	}
	restoreBytes(t, fs, intact, damaged)
	var err error
	eventually(t, "no read that began before is under way, which an attempt joins", func() bool {
		err = refused()
		return !errors.Is(err, storage.ErrDamaged)
	})
	if !errors.As(err, new(*RequestExpiredError)) {
		t.Fatal(err)
	}
	eventually(t, "a new request is executed", func() bool {
		_, err := putOnce(t, x, newRequest(), "other", "value")
		return err == nil
	})
	if err := refused(); !errors.As(err, new(*RequestExpiredError)) {
		t.Fatal(err)
	}
}
