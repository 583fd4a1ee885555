//go:build invariants

package wal

import (
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAssertionsOfTheTagFire breaks the state of a log in each way that only builds with the tag check.
func TestAssertionsOfTheTagFire(t *testing.T) {
	for name, c := range map[string]struct {
		message string
		fire    func(a *appender)
	}{
		"record published twice": {"is published twice", func(a *appender) {
			c, _ := a.cur.Load().Reserve(8)
			a.cur.Load().Publish(c)
			a.cur.Load().PublishNoOp(c)
		}},
		"durable past a reservation": {"is not published, and 2 is durable", func(a *appender) {
			c, _ := a.cur.Load().Reserve(8)
			a.log.durable.epoch.Store(2)
			a.cur.Load().Publish(c)
		}},
		"record outside its segment": {"is outside segment 1", func(a *appender) {
			c, _ := a.cur.Load().Reserve(8)
			c.offset = 64<<10 - recordHeaderSize - 8
			a.cur.Load().Publish(c)
		}},
		"buffer comes back twice": {"comes back that was not handed out", func(a *appender) {
			buf, err := a.log.buffers.take()
			if err != nil {
				panic(err)
			}
			a.log.buffers.put(buf, 0)
			a.log.buffers.put(buf, 0)
		}},
		"reader returns a buffer twice": {"more often than retained", func(a *appender) {
			a.log.RetainBuffer(a.cur.Load())
			a.log.ReturnBuffer(a.cur.Load())
			a.log.ReturnBuffer(a.cur.Load())
		}},
		"buffer handed out twice": {"is handed out twice", func(a *appender) {
			p := a.log.buffers
			buf, _ := p.take()
			p.idle = append(p.idle, usedBuffer{buf, 0})
			_, _ = p.take()
		}},
		"buffer with old records": {"is not zero", func(a *appender) {
			buf, _ := a.log.buffers.take()
			buf[9] = 1
			a.log.buffers.put(buf, 8)
			_, _ = a.log.buffers.take()
		}},
		"more buffers than were mapped": {"3 buffers are in use, 0 idle, 2 mapped", func(a *appender) {
			a.log.buffers.mapped--
			_, _ = a.log.buffers.take()
		}},
		"file recycled twice": {"is recycled while it has another use", func(a *appender) {
			a.log.preallocator.recycle("f", 64<<10)
			a.log.preallocator.recycle("f", 1)
		}},
		"file of a ready segment recycled": {"is recycled while it has another use", func(a *appender) {
			a.log.preallocator.recycle(a.log.preallocator.ready[0].path, 1)
		}},
		"waiter that knows another index": {"has index 5", func(a *appender) {
			a.log.waits.push(100).index = 5
			a.log.waits.wakeDurableLocked(a.log)
		}},
		"waiter for an epoch that is not requested": {"requested 1", func(a *appender) {
			a.log.waits.push(100)
			a.log.waits.newest = 1
			a.log.waits.wakeDurableLocked(a.log)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			opts := testOptions(vfs.NewMem(), 64<<10)
			a, err := startLog(opts, Recovery{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := a.put([]byte("a")); err != nil {
				t.Fatal(err)
			}
			waitForPreallocated(t, a.log)
			message := firing(func() error { c.fire(a); return nil })
			if !strings.Contains(message, "broken invariant") || !strings.Contains(message, c.message) {
				t.Errorf("got %q, want a broken invariant with %q", message, c.message)
			}
			close(a.log.stop) // Close would meet the broken state again
			a.log.background.Wait()
		})
	}
}
