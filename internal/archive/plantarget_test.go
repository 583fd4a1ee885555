package archive

import (
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// TestAStateThatACrashHasTakenBackIsNotRestored: clients may have seen an epoch that a restart skipped. The state before it, and the state
// at the last skipped epoch, exist.
func TestAStateThatACrashHasTakenBackIsNotRestored(t *testing.T) {
	a := newArchived(t)
	commit := func(e keys.Epoch) Record {
		return Record{Epoch: e, Body: body(t, 1_700_000_000_000_000+uint64(e), "key", []byte{byte(e)})}
	}
	a.put(Header{Lineage: testLineage, First: 1, Begin: BeginsFirst, Level: 2}, []Record{commit(1), commit(2), {Epoch: 10, Skipped: true}, commit(11)})
	a.put(Header{Lineage: testLineage, First: 12, Begin: Linked, Link: a.last, Level: 2}, []Record{{Epoch: 20, Skipped: true}, commit(21)})
	for target := keys.Epoch(1); target <= 21; target++ {
		for _, base := range []keys.Epoch{0, 2, 10, 11, 20} {
			if base > target {
				continue
			}
			list, err := a.replayed(Point{Epoch: base}, Target{Epoch: target})
			before := keys.Epoch(2)
			if target > 11 {
				before = 11
			}
			if target < 3 || target == 10 || target == 11 || target >= 20 {
				if err != nil || target > base && list[len(list)-1].Epoch != target {
					t.Errorf("epoch %d from %d: %v, %v", target, base, list, err)
				}
				continue
			}
			missing := new(MissingError)
			if !errors.As(err, &missing) || missing.From != before+1 || missing.Through != 10*(target/10+1)-1 || missing.Latest.Epoch != before || missing.Latest.Time.UnixMicro() != 1_700_000_000_000_000+int64(before) && base < before {
				t.Errorf("epoch %d from %d: %+v, %v", target, base, missing, err)
			}
		}
	}
}
