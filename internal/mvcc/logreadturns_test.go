package mvcc

import (
	"context"
	"testing"
	"time"
)

// TestClientsReadTheLogInTurn: however many reads of the log of a client wait, one of another client waits for one of them.
func TestClientsReadTheLogInTurn(t *testing.T) {
	s := ownedStore(t, func(o *Options) { o.Retention = time.Hour })
	x := mustSession(t, s)
	defer x.Close()
	mustPut(t, s, "k", "v")
	at := awaitTick(s) - 1
	awaitTick(s)
	mustPut(t, s, "k", "v")
	logReads, searches := &s.timeline.logReads, &s.timeline.searches
	for name, c := range map[string]struct {
		line *turnLine
		read func(ctx context.Context) error
	}{
		"a time": {logReads, func(ctx context.Context) error {
			_, err := x.EpochAt(ctx, at)
			return err
		}},
		"a history": {logReads, func(ctx context.Context) error {
			_, err := x.History(ctx, &HistoryOptions{Lower: []byte("k"), Upper: []byte("l"), Count: 10, Bytes: 1000})
			return err
		}},
		"the epoch before a time": {searches, func(ctx context.Context) error {
			_, _, err := s.Changes().EpochBefore(ctx, at)
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			flood := Owner{"flood", 1}
			turns := 0
			for c.line.ask(flood) == nil {
				turns++
			}
			var last *turnPlace
			for range 10 {
				last = c.line.ask(flood)
			}
			done := make(chan error, 1)
			go func() { done <- c.read(contextOf(t, "other")) }()
			eventually(t, "it waits for its turn", func() bool {
				c.line.mu.Lock()
				defer c.line.mu.Unlock()
				return c.line.clients.Of("other") == 1
			})
			c.line.leave() // for the oldest of the flood
			c.line.leave() // for the other
			select {
			case err := <-done:
				if err != nil {
					t.Error(err)
				}
			case <-t.Context().Done():
			}
			if isClosed(last.own.Value) {
				t.Error("all reads of a client had turns before that of another")
			}
			for c.line.free < turns { // only this goroutine has turns now
				c.line.leave()
			}
		})
	}
}
