package restore

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/keys"
)

// stopping is a source whose archiver is stopped at an entry of a bulk load, as it is when the server ends.
type stopping struct {
	archive.Source
	at   int
	stop context.CancelFunc
}

func (s *stopping) ReadLoad(ctx context.Context, epoch keys.Epoch, from []byte, each func(key, value []byte) error) error {
	return s.Source.ReadLoad(ctx, epoch, from, func(key, value []byte) error {
		if s.at--; s.at == 0 {
			s.stop()
		}
		return each(key, value)
	})
}

// TestALoadWhoseReadingIsStoppedIsInTheArchive: the server ends while its archiver reads a bulk load, some frames of an object have been made, and there is time
// for a last flush. The load, and what follows it, are restored.
func TestALoadWhoseReadingIsStoppedIsInTheArchive(t *testing.T) {
	for _, at := range []int{1000, 3000, 9000} {
		t.Run(fmt.Sprint(at), func(t *testing.T) {
			b := newBench(t)
			b.commits(5)
			b.archived()
			b.stop()
			b.fileBytes = 64 << 20
			load, err := b.store.BeginBulkLoad()
			check(t, err)
			for i := range 10_000 {
				key, value := fmt.Sprintf("load %05d", i), fmt.Sprintf("%0100d", i)
				check(t, load.Add([]byte(key), []byte(value)))
				b.now[key] = value
			}
			done, err := load.Commit(t.Context())
			check(t, errors.Join(err, load.Close()))
			loaded := done.Epoch
			b.states[loaded] = hash(b.now)
			b.commits(5)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			s := &stopping{Source: b.store.Changes(), at: at, stop: cancel}
			archive.New(s, b.archiveOptions()).Run(ctx)
			if s.at > 0 {
				t.Fatalf("it was not stopped: %d entries more", s.at)
			}
			b.close()
			b.open()
			b.commits(5)
			b.archived()
			if breaks := b.arch.Status().Breaks; breaks > 0 {
				t.Errorf("the archive has %d breaks", breaks)
			}
			for _, target := range []archive.Target{{Epoch: loaded}, {}} {
				r, got, err := b.restore(target)
				check(t, err)
				if got != b.state(r.Reached.Epoch) || r.Reached.Epoch < loaded {
					t.Errorf("the state at %d is another one", r.Reached.Epoch)
				}
			}
			b.close()
		})
	}
}
