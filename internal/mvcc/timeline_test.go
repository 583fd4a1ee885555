package mvcc

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// pastModel keeps every state of a store, and knows which of them must be readable.
type pastModel struct {
	t       *testing.T
	rng     *rand.Rand
	fs      *vfs.Mem
	options Options
	store   *Store
	states  map[keys.Epoch]map[string]string
	epochs  []keys.Epoch // of the client's commits
	times   []uint64     // of these
	holds   []Hold
	low     keys.Epoch // the largest low watermark so far
	jumps   bool       // the wall clock does
	wall    atomic.Int64
}

// wallClock is that of the system, which an operator sets now and then.
func (m *pastModel) wallClock() time.Time { return time.Now().Add(time.Duration(m.wall.Load())) }

// jump sets the wall clock.
func (m *pastModel) jump() {
	by := []time.Duration{time.Hour, -time.Hour, 24 * time.Hour, -24 * time.Hour}[m.rng.IntN(4)]
	m.wall.Add(int64(by))
}

func (m *pastModel) open() {
	s, err := Open(m.options)
	if err != nil {
		m.t.Fatal(err)
	}
	m.store = s
}

// restart ends the store, by a crash or not, and opens it again.
func (m *pastModel) restart(crash bool) {
	if crash {
		crashed := m.fs.Crash(m.rng.Uint64(), vfs.SurviveSome)
		_ = m.store.Close()
		m.fs = crashed
		m.options.Storage.FS = crashed
	} else if err := m.store.Close(); err != nil {
		m.t.Fatal(err)
	}
	m.open()
}

func (m *pastModel) commit() {
	x := mustSession(m.t, m.store)
	defer x.Close()
	state := map[string]string{}
	if n := len(m.epochs); n > 0 {
		maps.Copy(state, m.states[m.epochs[n-1]])
	}
	w := &Write{Durability: DurabilitySync}
	for _, i := range m.rng.Perm(6)[:1+m.rng.IntN(3)] {
		key := fmt.Sprint("key", i)
		if m.rng.IntN(4) == 0 {
			w.Delete([]byte(key))
			delete(state, key)
		} else {
			value := fmt.Sprintf("%d %0*d", len(m.epochs), m.rng.IntN(300), 0)
			w.Set([]byte(key), []byte(value))
			state[key] = value
		}
	}
	at := m.store.Clock().Now()
	epoch, err := commitAndWait(x, w)
	if err != nil {
		m.t.Fatal(err)
	}
	m.states[epoch], m.epochs, m.times = state, append(m.epochs, epoch), append(m.times, at)
}

// check reads the state of every commit that must be readable.
func (m *pastModel) check() {
	s, now := m.store, m.store.Clock().Now()
	low := s.LowWatermark()
	if low < m.low {
		m.t.Fatalf("the low watermark fell from %d to %d", m.low, low)
	}
	m.low = low
	x := mustSession(m.t, s)
	defer x.Close()
	held := keys.MaxEpoch
	for _, h := range m.holds {
		if h.Deadline > now/1000+1 {
			held = min(held, h.Epoch)
		}
	}
	for i, e := range m.epochs {
		must := e >= low || e >= held
		if i+1 < len(m.times) && m.epochs[i+1] <= low { // else the state of e is that of the low watermark, too
			must = must || m.times[i+1]+uint64(m.options.Retention.Microseconds()) > now
		}
		for key := range 6 {
			name := fmt.Sprint("key", key)
			v, err := x.Get(nil, []byte(name), e)
			want, found := m.states[e][name]
			if errors.As(err, new(*SnapshotGoneError)) && !must {
				break
			}
			if err != nil || v.Found != found || string(v.Data) != want {
				m.t.Fatalf("%s at %d of %d, low watermark %d, held %d: %q, %v, want %q", name, e, s.Visible(), low, held, v.Data, err, want)
			}
		}
	}
}

// checkTime looks a time up.
func (m *pastModel) checkTime() {
	now := m.store.Clock().Now()
	at := now - uint64(m.rng.Int64N(m.options.Retention.Microseconds()*5/4))
	epoch, err := m.store.EpochAt(m.t.Context(), at)
	var wrong *TimeError
	if errors.As(err, &wrong) {
		if first := len(m.times) > 0 && m.times[0]+uint64(2*m.store.timeline.every.Microseconds()) < at; wrong.Future() != (at >= now) || first && !wrong.Future() && now-at < uint64(m.options.Retention.Microseconds()) {
			m.t.Fatalf("%d µs ago: %v", now-at, err)
		}
		return
	}
	if err != nil {
		m.t.Fatal(err)
	}
	for i, e := range m.epochs {
		if e <= epoch && m.times[i] > at {
			m.t.Fatalf("the state %d µs ago is %d; but %d was committed %d µs ago", now-at, epoch, e, now-m.times[i])
		}
		if e > epoch && m.times[i]+uint64(2*m.store.timeline.every.Microseconds()) < at {
			m.t.Fatalf("the state %d µs ago is %d; but %d was committed %d µs ago", now-at, epoch, e, now-m.times[i])
		}
	}
}

func (m *pastModel) step() {
	x := mustSession(m.t, m.store)
	defer x.Close()
	if m.jumps && m.rng.IntN(20) == 0 {
		m.jump()
	}
	switch n := m.rng.IntN(100); {
	case n < 60:
		m.commit()
	case n < 75:
		time.Sleep(time.Duration(m.rng.Int64N(int64(2 * time.Second))))
	case n < 85:
		if err := m.store.Checkpoint(m.t.Context()); err != nil {
			m.t.Fatal(err)
		}
	case n < 90 && len(m.epochs) > 0:
		at := m.epochs[m.rng.IntN(len(m.epochs))]
		h, err := x.TakeHold(m.t.Context(), "test", at, time.Duration(1+m.rng.IntN(30))*time.Second)
		if err == nil {
			if m.rng.IntN(2) == 0 {
				if h, err = x.RenewHold(m.t.Context(), h.ID, time.Minute); err != nil {
					m.t.Fatal(err)
				}
			}
			m.holds = append(m.holds, h)
		} else if !errors.As(err, new(*SnapshotGoneError)) || at >= m.store.LowWatermark() {
			m.t.Fatal(err)
		}
	case n < 93 && len(m.holds) > 0:
		i := m.rng.IntN(len(m.holds))
		if _, err := x.EndHold(m.t.Context(), m.holds[i].ID); err != nil && !errors.Is(err, ErrNoHold) {
			m.t.Fatal(err)
		}
		m.holds = slices.Delete(m.holds, i, i+1)
	case n < 97:
		x.Close()
		m.restart(m.rng.IntN(2) == 0)
	default:
		time.Sleep(time.Duration(m.rng.Int64N(int64(20 * time.Second))))
	}
}

// TestThePastStaysReadable compares a store that keeps the past for ten seconds with a model that keeps it forever: within
// that time, and from the epochs of holds on, every state is readable, at its epoch and at its time, through checkpoints,
// restarts and crashes; the history has every version, and a comparison of two states every key in which they differ. In every
// second round the wall clock jumps by an hour or a day, forward or back, before restarts as well.
func TestThePastStaysReadable(t *testing.T) {
	base := testseed.Base(t)
	for seed := base; seed < base+4; seed++ {
		synctest.Test(t, func(t *testing.T) {
			t.Logf("seed %d", seed)
			o := tiny(vfs.NewMem())
			o.Retention = 10 * time.Second
			o.SyncInterval, o.GCInterval = 50*time.Millisecond, 100*time.Millisecond
			m := &pastModel{t: t, rng: rand.New(rand.NewPCG(seed, 0)), fs: o.Storage.FS.(*vfs.Mem), options: o, states: map[keys.Epoch]map[string]string{}}
			m.jumps, m.options.WallClock = seed%2 == 1, m.wallClock
			m.open()
			defer func() { _ = m.store.Close() }()
			for range 120 {
				m.step()
				m.check()
				m.checkTime()
				m.checkHistory()
				m.checkDiff()
			}
		})
	}
}
