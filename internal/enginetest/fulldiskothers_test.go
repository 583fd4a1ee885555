package enginetest

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestOthersFillTheDiskAgainAndAgain: other programs fill the disk and take at times every byte that becomes free, beside puts of all sizes and bulk
// loads. A deletion is never refused, and what was acknowledged is there.
func TestOthersFillTheDiskAgainAndAgain(t *testing.T) {
	seed, fs := testseed.Base(t), vfs.NewMem()
	o := reserving(fs)
	o.Storage.MemoryBytes, o.Storage.DiskReserve, o.Storage.ChangeLog = 4<<20, 8<<20, storage.ChangeLog{Age: time.Hour}
	s := mustOpen(t, o)
	var full, stop atomic.Bool
	fs.SetHook(func(op vfs.Op, _ string) {
		if op == vfs.OpPreallocate && full.Load() {
			fs.LeaveFree(0)
		}
	})
	var writers sync.WaitGroup
	var mu sync.Mutex
	want, loaded := map[string]string{}, ""
	write := func(name string, keys, bytes int) {
		r, x, mine := rand.New(rand.NewPCG(seed, uint64(bytes))), mustSession(t, s), map[string]string{}
		defer x.Close()
		for !stop.Load() {
			key, w := fmt.Sprint(name, "/", r.IntN(keys)), mvcc.Write{}
			value, deletes := strings.Repeat("v", 1+r.IntN(bytes)), r.IntN(3) == 0
			var err error
			switch {
			case deletes && r.IntN(20) == 0:
				key = ""
				_, err = x.DeleteRange(t.Context(), mvcc.RangeDelete{Lower: []byte(name + "/"), Upper: []byte(name + "0")})
			case deletes:
				w.Delete([]byte(key))
				_, err = commitAndWait(x, &w)
			default:
				w.Set([]byte(key), []byte(value))
				_, err = commitAndWait(x, &w)
			}
			switch {
			case err == nil && key == "":
				clear(mine)
			case err == nil && deletes:
				delete(mine, key)
			case err == nil:
				mine[key] = value
			case deletes || !errors.Is(err, vfs.ErrNoSpace):
				t.Errorf("deletes %v: %v; %+v", deletes, err, s.Stats().Storage.Log)
				stop.Store(true)
			}
		}
		mu.Lock()
		defer mu.Unlock()
		for key, value := range mine {
			want[key] = value
		}
	}
	for i, bytes := range []int{100, 5000, 40_000, 300_000, 600_000} {
		writers.Go(func() { write(fmt.Sprint(i), 5_000_000/bytes, bytes) })
	}
	writers.Go(func() {
		for round := 0; !stop.Load(); round++ {
			l, err := s.BeginBulkLoad()
			if err != nil {
				continue
			}
			value := fmt.Sprintf("%01000d", round)
			for i := 0; i < 100 && err == nil; i++ {
				err = l.Add(fmt.Append(nil, "load", i), []byte(value))
			}
			if _, err = l.Commit(t.Context()); err == nil {
				loaded = value
			}
			if err = cmp.Or(err, l.Close()); err != nil && !errors.Is(err, vfs.ErrNoSpace) && !errors.Is(err, storage.ErrBulkLoadYielded) {
				t.Error(err)
			}
		}
	})
	r := rand.New(rand.NewPCG(seed, 1))
	for range 40 {
		full.Store(false)
		fs.LeaveFree(r.Int64N(2 << 20))
		time.Sleep(time.Duration(r.IntN(10)) * time.Millisecond)
		full.Store(true)
		time.Sleep(time.Duration(r.IntN(30)) * time.Millisecond)
		if r.IntN(3) == 0 {
			full.Store(false)
			fs.SetCapacity(0)
			time.Sleep(time.Duration(r.IntN(30)) * time.Millisecond)
		}
	}
	stop.Store(true)
	writers.Wait()
	full.Store(false)
	fs.SetCapacity(0)
	for i := 0; i < 100 && loaded != ""; i++ {
		want[fmt.Sprint("load", i)] = loaded
	}
	mustHold(t, s, want)
}
