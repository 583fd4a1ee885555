package peers

import "testing"

// TestTableKeysNameTheirRecord: a key that a scan returns leads to its record, in both shapes of keys.
func TestTableKeysNameTheirRecord(t *testing.T) {
	r := newRecords(1, 100)
	for _, shape := range []string{"random", "table"} {
		for i := range 1000 {
			if got := r.number(r.key(i)); got != i {
				t.Fatalf("%s: key %q is of record %d, not of %d", shape, r.key(i), got, i)
			}
		}
		r.numberKeys()
	}
	if got := r.number([]byte("table/99999999999/column")); got != -1 {
		t.Errorf("an unknown key is of record %d", got)
	}
}
