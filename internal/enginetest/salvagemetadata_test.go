package enginetest

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestSalvageKeepsDeadlinesAndLeases wherever it finds a version: through the tree, in leaves that nothing leads to, in the repair
// tree, in the log, and with values outside of the leaf.
func TestSalvageKeepsDeadlinesAndLeases(t *testing.T) {
	o := modelOptions(vfs.NewMem())
	want := map[string]inspect.Salvaged{}
	write := func(from, to int, value string) {
		t.Helper()
		s := mustReopen(t, o)
		s.GuardLeases(mvcc.LeaseGuard{Admit: func(uint64, int) error { return nil }, Room: func(uint64) int { return 1 << 20 }})
		x := mustSession(t, s)
		for i := from; i < to; i++ {
			key, e := fmt.Sprintf("k%03d", i), inspect.Salvaged{Value: fmt.Appendf(nil, "%d %s", i, value)}
			switch i % 4 {
			case 0:
				e.Metadata = metadata.Fields{ExpiresAt: 1<<50 + uint64(i)}
			case 1:
				e.Metadata = metadata.Fields{Lease: uint64(i)}
			case 2:
				e.Metadata, e.Value = metadata.Fields{ExpiresAt: 1 << 50, Lease: 7}, []byte(strings.Repeat(value, 1000))
			}
			w := mvcc.Write{Durability: mvcc.DurabilitySync}
			w.SetWithMetadata([]byte(key), e.Value, &e.Metadata)
			if _, err := commitAndWait(x, &w); err != nil {
				t.Fatal(err)
			}
			want[key] = e
		}
		x.Close()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	check := func(where string) {
		t.Helper()
		got, report := mustSalvageAll(t, o.Storage.FS)
		expiring, leased := uint64(0), uint64(0)
		for key, e := range want {
			if g, ok := got[key]; !ok || string(g.Value) != string(e.Value) || g.Metadata != e.Metadata {
				t.Errorf("%s: %q is %.20q with %+v, want %.20q with %+v", where, key, g.Value, g.Metadata, e.Value, e.Metadata)
			}
		}
		for _, e := range got {
			if e.Metadata.ExpiresAt != 0 {
				expiring++
			}
			if e.Metadata.Lease != 0 {
				leased++
			}
		}
		if report.Expiring != expiring || report.Leased != leased {
			t.Errorf("%s: %d keys with a deadline and %d with a lease, want %d and %d", where, report.Expiring, report.Leased, expiring, leased)
		}
	}
	write(0, 200, "first")
	check("in the tree")

	damaged := damageUserLeaves(t, o.Storage.FS, o.Storage.PageSize)
	if len(damaged) < 3 {
		t.Fatalf("%d leaves are damaged: the test tests too little", len(damaged))
	}
	clear(want)
	write(50, 120, "second")
	check("in the repair tree")

	s := mustReopen(t, o)
	mustPut(t, s, "log", "only")
	if err := s.Wait(context.Background(), s.Visible(), mvcc.DurabilitySync); err != nil {
		t.Fatal(err)
	}
	want["log"] = inspect.Salvaged{Value: []byte("only")}
	s.GuardLeases(mvcc.LeaseGuard{Admit: func(uint64, int) error { return nil }, Room: func(uint64) int { return 1 << 20 }})
	x := mustSession(t, s)
	w := mvcc.Write{Durability: mvcc.DurabilitySync}
	w.SetWithMetadata([]byte("log too"), []byte("value"), &metadata.Fields{ExpiresAt: 1 << 50, Lease: 3})
	if _, err := commitAndWait(x, &w); err != nil {
		t.Fatal(err)
	}
	want["log too"] = inspect.Salvaged{Value: []byte("value"), Metadata: metadata.Fields{ExpiresAt: 1 << 50, Lease: 3}}
	x.Close()
	crashed := o.Storage.FS.(*vfs.Mem).Crash(1, vfs.SurviveNone)
	_ = s.Close() // on a file system that has crashed
	o.Storage.FS = crashed
	check("in the log")

	flip(t, crashed, int64(rootPage(t, crashed))*int64(o.Storage.PageSize)+100)
	check("below a damaged root")
}
