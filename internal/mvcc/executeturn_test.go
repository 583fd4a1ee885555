package mvcc

import (
	"context"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestASlowExecutionKeepsNoOtherWaiting: both have lost so often that they take turns, and they are about different keys. The first one
// takes as long as it likes.
func TestASlowExecutionKeepsNoOtherWaiting(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	execute := func(ctx context.Context, x *Session, key string, last func()) error {
		attempts := 0
		_, err := x.Execute(ctx, &Execution{Write: &Write{Durability: DurabilityAsync}, Operate: func(_ context.Context, tx *Txn, _ bool) error {
			if _, err := tx.Get(nil, []byte(key)); err != nil {
				return err
			}
			if attempts++; attempts <= executeAttemptsFree {
				mustPut(t, s, key, "of another writer")
			} else {
				last()
			}
			return tx.Set([]byte(key), []byte("own"))
		}})
		return err
	}
	x, y := mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer y.Close()
	begun, release, slow := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		slow <- execute(context.Background(), x, "slow", func() {
			close(begun)
			<-release
		})
	}()
	<-begun
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := execute(ctx, y, "other", func() {}); err != nil {
		t.Errorf("the other one: %v", err)
	}
	close(release)
	if err := <-slow; err != nil {
		t.Errorf("the slow one: %v", err)
	}
	for _, key := range []string{"slow", "other"} {
		if got := get(t, s, key, 0); got != "own" {
			t.Errorf("%s is %q", key, got)
		}
	}
}
