package restore

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// eachBlobPage changes the pages with large values in the data file of a store that is closed.
func (b *bench) eachBlobPage(change func(id page.ID, p []byte)) {
	b.t.Helper()
	name := filepath.Join(b.dir, "data.ekv")
	content, err := os.ReadFile(name)
	check(b.t, err)
	const size = 1024
	for at := 2 * size; at+size <= len(content); at += size {
		if p := content[at : at+size]; page.ReadHeader(p).Type == page.TypeBlobs {
			change(page.ID(at/size), p)
		}
	}
	check(b.t, os.WriteFile(name, content, 0o600))
}

// put sets keys to large values that begin with a text.
func (b *bench) put(n int, text string) {
	b.t.Helper()
	x, err := b.store.Session()
	check(b.t, err)
	defer x.Close()
	for i := range n {
		var w mvcc.Write
		key, value := fmt.Sprintf("key %03d", i), fmt.Sprintf("%s %d %s", text, i, strings.Repeat("x", 500+i*20))
		w.Set([]byte(key), []byte(value))
		b.now[key] = value
		epoch, err := x.Commit(b.t.Context(), &w)
		check(b.t, err)
		check(b.t, b.store.Wait(b.t.Context(), epoch, mvcc.DurabilitySync))
		b.states[epoch] = hash(b.now)
	}
}

// TestAStoreThatHasLostSpaceIsRestored: nothing refers to some values that could not be read for a while when they were overwritten. Nothing of the data is
// missing.
func TestAStoreThatHasLostSpaceIsRestored(t *testing.T) {
	b := newBench(t)
	b.put(40, "old")
	b.archived()
	b.close()
	was := map[page.ID]byte{}
	b.eachBlobPage(func(id page.ID, p []byte) {
		was[id] = p[500]
		p[500]++
	})
	b.open()
	b.put(40, "new")
	check(t, b.store.Checkpoint(t.Context()))
	b.close()
	b.eachBlobPage(func(id page.ID, p []byte) {
		if v, ok := was[id]; ok && page.Check(p, id) != nil {
			p[500] = v
		}
	})
	b.open()
	report, err := b.store.Verify(t.Context(), inspect.VerifyOptions{})
	check(t, err)
	if report.OK() || !report.OnlySpace() || report.Damages[0].Kind != inspect.DamageAccounts {
		t.Fatalf("no space is lost: the test tests nothing: %+v", report.Damages)
	}
	m, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	r, got, err := b.restore(archive.Target{Epoch: m.Epoch()})
	check(t, err)
	if r.Base.ID != m.ID || got != hash(b.now) || r.LostSpace == "" || len(r.Damages) > 0 {
		t.Fatalf("%+v", r)
	}
	if _, err := b.drill(nil); err != nil {
		t.Fatalf("a drill: %v", err)
	}
}
