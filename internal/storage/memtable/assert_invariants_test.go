//go:build invariants

package memtable

import (
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// TestPruneChecksTheOrderOfAChain swaps the epochs of two versions.
func TestPruneChecksTheOrderOfAChain(t *testing.T) {
	table, err := New(Config{Bytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	var in Inserter
	for epoch := keys.Epoch(1); epoch <= 3; epoch++ {
		var b batch.Builder
		b.Set(keys.SpaceUser, []byte("k"), []byte("v"))
		body, err := b.Finish()
		if err != nil {
			t.Fatal(err)
		}
		if err := table.Secure(&in, MaxSize(body)); err != nil {
			t.Fatal(err)
		}
		if err := table.Apply(&in, body, epoch, false); err != nil {
			t.Fatal(err)
		}
	}
	var it Iter
	it.Init(table)
	if !it.First() {
		t.Fatal("the table is empty")
	}
	base := table.arena.base
	newest := it.current()
	older := versionOlder(base, newest).Load()
	*raw64(base, newest), *raw64(base, older) = *raw64(base, older), *raw64(base, newest)
	defer func() {
		if message, _ := recover().(string); !strings.Contains(message, "is older in its chain") {
			t.Errorf("recovered %q; expected a broken invariant", message)
		}
		if err := table.Free(); err != nil {
			t.Error(err)
		}
	}()
	table.Prune(it.Chain(), &GCWatermarks{MinVisible: 3, LowWatermark: 3}, &Retired{})
}
