package storage

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// TestPatienceIsBounded for a page, for all pages, and by the context.
func TestPatienceIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		p := patience{ctx: ctx, left: defaultStartPatience, first: defaultStartPatience / firstPauseShare}
		began := time.Now()
		pages, reads := 0, 0
		for ; p.left > p.first; pages++ {
			failed := 1
			for ; p.again(failed); failed++ {
				reads++
			}
			if waited := time.Since(began); pages == 0 && (failed != pausesMax+1 || waited < time.Second || waited > 2*time.Second) {
				t.Errorf("the first page: %d pauses in %v", failed-1, waited)
			}
			if pages > 10 {
				break
			}
		}
		if waited := time.Since(began); pages < 3 || waited > defaultStartPatience {
			t.Errorf("%d pages, %d reads, %v", pages, reads, waited)
		}
		p.left = time.Hour
		cancel()
		if began = time.Now(); p.again(1) && p.again(2) && p.again(3) || time.Since(began) > time.Second {
			t.Error("waits after the end of the context")
		}
	})
}
