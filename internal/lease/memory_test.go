package lease

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/config"
)

// TestALeaseTakesWhatTheBoundSays, with the longest owner, and each with a client of its own.
func TestALeaseTakesWhatTheBoundSays(t *testing.T) {
	const n = 150_000
	m := &Manager{leases: map[ID]*entry{}, lines: lines{all: map[uint64]*line{}}}
	m.options.Elapsed = func() time.Duration { return 0 }
	live := func() int64 {
		var s runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&s)
		return int64(s.HeapAlloc)
	}
	before := live()
	for i := range ID(n) {
		m.enter(i, &record{ttl: time.Hour, owner: strings.Repeat("o", OwnerBytesMax)})
		m.passTo(m.leases[i], uint64(i))
	}
	each := (live() - before) / n
	if runtime.KeepAlive(m); each > config.LeaseBytes || each < config.LeaseBytes/2 {
		t.Errorf("a lease takes %d bytes, and the bound has %d", each, config.LeaseBytes)
	}
}
