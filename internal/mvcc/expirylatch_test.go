package mvcc

import (
	"context"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestPutBesideTheExpirerIsNotDeleted: keys are put again, without a deadline, while a commit of the expirer looks at all of them.
// A put waits for the latch of its key: it is after the deletion, or the expirer sees it.
func TestPutBesideTheExpirerIsNotDeleted(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x, writer := mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer writer.Close()
	b, expired := new(expiryBatch), 0
	for round := range 40 / exhaustiveStep {
		b.reset()
		for i := range expiryBatchMax {
			key := fmt.Sprintf("k%03d", i)
			putWith(t, x, key, "old", metadata.Fields{ExpiresAt: far})
			b.add(keys.AppendOwned(nil, keys.SystemExpiry, far, keys.Append(nil, keys.SpaceUser, []byte(key))))
		}
		started, done := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			close(started)
			b.commit(context.Background(), x)
		}()
		<-started
		for i := range expiryBatchMax {
			w := &Write{Durability: DurabilityAsync}
			w.Set(fmt.Appendf(nil, "k%03d", i*37%expiryBatchMax), []byte("new"))
			if _, err := commitAndWait(writer, w); err != nil {
				t.Fatal(err)
			}
		}
		if <-done; b.err != nil {
			t.Fatal(b.err)
		}
		expired += b.expired
		for i := range expiryBatchMax {
			if got := get(t, s, fmt.Sprintf("k%03d", i), 0); got != "new" {
				t.Fatalf("round %d: key %d is %q, and was put without a deadline", round, i, got)
			}
		}
	}
	t.Logf("%d keys expired before they were put", expired)
}
