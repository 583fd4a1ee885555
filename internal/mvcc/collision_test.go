package mvcc

import (
	"context"
	"strconv"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// sameLatch finds n keys that share one latch.
func sameLatch(s *Store, n int) (same []string) {
	stripe := func(key string) int {
		var set latchSet
		set.add(s.latches, keys.Append(nil, keys.SpaceUser, []byte(key)))
		return set.only
	}
	want := stripe("0")
	for i := 0; len(same) < n; i++ {
		if key := strconv.Itoa(i); stripe(key) == want {
			same = append(same, key)
		}
	}
	return same
}

// TestCommitOfAKeyWithTheSameLatchIsNoConflict: the latch knows that something under it has changed
// since the snapshot, and the transaction looks whether it is its own key.
func TestCommitOfAKeyWithTheSameLatchIsNoConflict(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	same := sameLatch(s, 2)
	for _, isolation := range []Isolation{IsolationSnapshot, IsolationSerializable} {
		for _, where := range []string{"memtable", "tree"} {
			x := mustSession(t, s)
			defer x.Close()
			tx, err := x.Begin(TxnOptions{Isolation: isolation, Durability: DurabilityAsync})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Get(nil, []byte(same[0])); err != nil {
				t.Fatal(err)
			}
			if err := tx.Set([]byte(same[0]), []byte("v")); err != nil {
				t.Fatal(err)
			}
			mustPut(t, s, same[1], "w")
			if where == "tree" {
				if err := s.Checkpoint(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := tx.Commit(context.Background()); err != nil {
				t.Errorf("isolation %d, the other key in the %s: %v", isolation, where, err)
			}
		}
	}
}

// TestKeysThatShareALatchAbortNothing: goroutines that increment keys of their own, all under one
// latch, wait for each other and never retry.
func TestKeysThatShareALatchAbortNothing(t *testing.T) {
	const goroutines, each = 4, 300
	s := mustOpen(t, tiny(vfs.NewMem()))
	same := sameLatch(s, 2*goroutines)
	var wait sync.WaitGroup
	for g := range goroutines {
		wait.Go(func() {
			x, err := s.Session()
			if err != nil {
				t.Error(err)
				return
			}
			defer x.Close()
			for range each {
				if err := incrementBoth(x, same[2*g], same[2*g+1]); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wait.Wait()
	for _, key := range same {
		if got := get(t, s, key, 0); got != strconv.Itoa(each) {
			t.Errorf("%s is %s, want %d", key, got, each)
		}
	}
	if n := s.Stats().Conflicts; n != 0 {
		t.Errorf("%d conflicts between keys that no two transactions share", n)
	}
}

func incrementBoth(x *Session, a, b string) error {
	tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
	for _, key := range []string{a, b} {
		if err == nil {
			_, err = tx.Invoke(&Invoke{Kind: InvokeAdd, Key: []byte(key), Delta: 1})
		}
	}
	if err == nil {
		_, err = tx.Commit(context.Background())
	}
	return err
}
