package sim

import (
	"strings"
	"testing"
	"time"
)

// at makes a transaction that ran from second to second.
func at(call, end int, status Status, ops ...Op) *Txn {
	return &Txn{Ops: ops, Status: status, Call: time.Duration(call) * time.Second, Return: time.Duration(end) * time.Second}
}

func read(key string, list ...int) Op { return Op{Kind: Read, Key: key, List: list} }

func add(key string, number int) Op { return Op{Kind: Append, Key: key, Number: number} }

func scan(prefix string, all map[string][]int) Op { return Op{Kind: Scan, Key: prefix, Lists: all} }

// Histories that are wrong on purpose: the checkers must report them at the right level; and some
// that are right.
func TestCheckersAcceptRightAndRefuseWrongHistories(t *testing.T) {
	cases := []struct {
		name          string
		txns          []*Txn
		snapshot      string // what CheckLists says at Snapshot, empty if nothing
		strict        string // and at Strict
		linearRefuses bool
	}{
		{
			name: "one after another",
			txns: []*Txn{
				at(0, 1, Committed, add("x", 1)), at(2, 3, Committed, read("x", 1), add("x", 2)), at(4, 5, Committed, read("x", 1, 2)),
			},
		},
		{
			name: "lost update",
			txns: []*Txn{
				at(0, 3, Committed, read("x"), add("x", 1)), at(1, 3, Committed, read("x"), add("x", 2)), at(4, 5, Committed, read("x", 2)),
			},
			snapshot: "lost update", strict: "lost update", linearRefuses: true,
		},
		{
			name: "lost acknowledged write",
			txns: []*Txn{at(0, 1, Committed, add("x", 1)), at(2, 3, Committed, read("x"))},
			// Nothing else was read.
			snapshot: "lost update", strict: "lost update", linearRefuses: true,
		},
		{
			name: "write skew",
			txns: []*Txn{
				at(0, 3, Committed, read("x"), read("y"), add("x", 1)), at(0, 3, Committed, read("x"), read("y"), add("y", 2)),
				at(4, 5, Committed, read("x", 1), read("y", 2)),
			},
			strict: "a cycle", linearRefuses: true,
		},
		{
			name: "write skew on a predicate",
			txns: []*Txn{
				at(0, 3, Committed, scan("d/", nil), add("d/1", 1)), at(0, 3, Committed, scan("d/", nil), add("d/2", 2)),
				at(4, 5, Committed, read("d/1", 1), read("d/2", 2)),
			},
			strict: "a cycle", linearRefuses: true,
		},
		{
			name: "read skew",
			txns: []*Txn{
				at(0, 9, Committed, read("x"), read("y", 2)), at(1, 8, Committed, add("x", 1), add("y", 2)),
				at(10, 11, Committed, read("x", 1), read("y", 2)),
			},
			snapshot: "G-single", strict: "a cycle", linearRefuses: true,
		},
		{
			name: "circular information flow",
			txns: []*Txn{
				at(0, 9, Committed, add("x", 1), read("y", 2)), at(0, 9, Committed, add("y", 2), read("x", 1)),
				at(10, 11, Committed, read("x", 1), read("y", 2)),
			},
			snapshot: "G1c", strict: "a cycle", linearRefuses: true,
		},
		{
			name:     "aborted read",
			txns:     []*Txn{at(0, 1, Aborted, add("x", 1)), at(0, 3, Committed, read("x", 1))},
			snapshot: "G1a", strict: "G1a", linearRefuses: true,
		},
		{
			name: "intermediate read",
			txns: []*Txn{
				at(0, 9, Committed, add("x", 1), add("x", 2)), at(0, 9, Committed, read("x", 1)), at(10, 11, Committed, read("x", 1, 2)),
			},
			snapshot: "G1b", strict: "G1b", linearRefuses: true,
		},
		{
			name:     "fuzzy read",
			txns:     []*Txn{at(0, 9, Committed, read("x"), read("x", 1)), at(0, 9, Committed, add("x", 1)), at(10, 11, Committed, read("x", 1))},
			snapshot: "fuzzy", strict: "fuzzy", linearRefuses: true,
		},
		{
			name:     "own write not seen",
			txns:     []*Txn{at(0, 1, Committed, add("x", 1), read("x")), at(2, 3, Committed, read("x", 1))},
			snapshot: "own appends", strict: "own appends", linearRefuses: true,
		},
		{
			name:     "stale read",
			txns:     []*Txn{at(0, 1, Committed, add("x", 1)), at(2, 3, Committed, read("x")), at(4, 5, Committed, read("x", 1))},
			snapshot: "G-single", strict: "a cycle", linearRefuses: true,
		},
		{
			name: "two orders",
			txns: []*Txn{
				at(0, 9, Committed, add("x", 1)), at(0, 9, Committed, add("x", 2)), at(0, 9, Committed, read("x", 1)),
				at(10, 11, Committed, read("x", 2, 1)),
			},
			snapshot: "two orders", strict: "two orders", linearRefuses: true,
		},
		{
			name:     "out of nothing",
			txns:     []*Txn{at(0, 1, Committed, read("x", 7))},
			snapshot: "no transaction appended", strict: "no transaction appended", linearRefuses: true,
		},
		{
			name: "unknown, and it happened",
			txns: []*Txn{at(0, 1, Unknown, add("x", 1)), at(2, 3, Committed, read("x")), at(4, 5, Committed, read("x", 1))},
		},
		{
			name: "unknown, and it did not happen",
			txns: []*Txn{at(0, 1, Unknown, read("x"), add("x", 1)), at(2, 3, Committed, add("x", 2)), at(4, 5, Committed, read("x", 2))},
		},
		{
			name:     "unknown, and it happened by half",
			txns:     []*Txn{at(0, 1, Unknown, add("x", 1), add("y", 2)), at(2, 3, Committed, read("x", 1)), at(4, 5, Committed, read("x", 1), read("y"))},
			snapshot: "lost update", strict: "lost update", linearRefuses: true,
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			for level, want := range map[Level]string{Snapshot: c.snapshot, Strict: c.strict} {
				err := CheckLists(c.txns, level)
				if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
					t.Errorf("level %d: got %v, want %q", level, err, want)
				}
			}
			if err := CheckLinear(c.txns, 10*time.Second); (err != nil) != c.linearRefuses {
				t.Errorf("porcupine: %v", err)
			}
		})
	}
}
