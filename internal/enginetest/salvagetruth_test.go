package enginetest

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// truth is a store with a history, of which copies are damaged.
type truth struct {
	*testing.T
	rng   *rand.Rand
	mem   *vfs.Mem
	now   map[string]string
	inLog map[string]bool // written since the last checkpoint
	ever  map[string]map[string]bool
	o     mvcc.Options
}

// truthCopies is how many copies of each store are damaged.
const truthCopies = 60

var truthSeeds = flag.Int("truth.seeds", 3, "stores of TestSalvageTellsWhatIsLost")

// TestSalvageTellsWhatIsLost: of a store with random damage, every key that does not come out as it was is in a range that is reported as
// lost, and no key comes out with a value that it never had.
func TestSalvageTellsWhatIsLost(t *testing.T) {
	base := testseed.Base(t)
	for i := range uint64(*truthSeeds) {
		t.Run(fmt.Sprint("seed=", base+i), func(t *testing.T) {
			c := &truth{T: t, rng: rand.New(rand.NewPCG(base+i, 77)), mem: vfs.NewMem(), now: map[string]string{}, inLog: map[string]bool{}, ever: map[string]map[string]bool{}}
			c.o = modelOptions(c.mem)
			c.live()
			for range truthCopies {
				c.ruin()
			}
		})
	}
}

func (c *truth) live() {
	for range 1 + c.rng.IntN(3) {
		s, err := mvcc.Open(c.o)
		if err != nil {
			c.Fatal(err)
		}
		x := mustSession(c, s)
		for range 3 + c.rng.IntN(12) {
			c.act(s, x)
		}
		x.Close()
		switch c.rng.IntN(3) {
		case 0:
			if err := s.Close(); err != nil {
				c.Fatal(err)
			}
			c.inLog = map[string]bool{}
		default:
			mem := c.mem.Crash(c.rng.Uint64(), vfs.SurviveAll)
			_ = s.Close()
			c.mem = mem
			c.o.Storage.FS = mem
		}
	}
}

func (c *truth) note(k, v string) {
	if c.ever[k] == nil {
		c.ever[k] = map[string]bool{}
	}
	c.ever[k][v] = true
	c.inLog[k] = true
}

func (c *truth) act(s *mvcc.Store, x *session) {
	switch c.rng.IntN(8) {
	case 0:
		if err := s.Checkpoint(context.Background()); err != nil {
			c.Fatal(err)
		}
		c.inLog = map[string]bool{}
	case 1:
		load, err := s.BeginBulkLoad()
		if err != nil {
			c.Fatal(err)
		}
		for range 1 + c.rng.IntN(80) {
			k := fmt.Sprintf("key %03d", c.rng.IntN(400))
			v := c.value()
			if err := load.Add([]byte(k), []byte(v)); err != nil {
				c.Fatal(err)
			}
			c.now[k] = v
			c.note(k, v)
		}
		if _, err := load.Commit(context.Background()); err != nil {
			c.Fatal(err)
		}
		_ = load.Close()
		c.inLog = map[string]bool{}
	default:
		for range 1 + c.rng.IntN(30) {
			var w mvcc.Write
			for _, n := range c.rng.Perm(400)[:1+c.rng.IntN(5)] {
				k := fmt.Sprintf("key %03d", n)
				if c.rng.IntN(4) == 0 {
					w.Delete([]byte(k))
					delete(c.now, k)
					c.inLog[k] = true
					continue
				}
				v := c.value()
				w.Set([]byte(k), []byte(v))
				c.now[k] = v
				c.note(k, v)
			}
			e, err := x.Commit(context.Background(), &w)
			if err == nil {
				err = s.Wait(context.Background(), e, mvcc.DurabilitySync)
			}
			if err != nil {
				c.Fatal(err)
			}
		}
	}
}

func (c *truth) value() string {
	n := c.rng.IntN(60)
	switch c.rng.IntN(12) {
	case 0:
		n = c.rng.IntN(6000)
	case 1:
		n = c.rng.IntN(500)
	}
	return fmt.Sprintf("%d %s", c.rng.Uint64(), strings.Repeat("x", n))
}

func (c *truth) ruin() {
	old := c.mem
	copied := old.Crash(1, vfs.SurviveProcess)
	var did []string
	logToo := false
	for range c.rng.IntN(4) {
		what := c.damage(copied)
		logToo = logToo || strings.Contains(what, "wal")
		did = append(did, what)
	}
	found := map[string]string{}
	report, err := inspect.Salvage(context.Background(), copied, "db", func(e *inspect.Salvaged) error {
		k, v := string(e.Key), string(e.Value)
		if _, twice := found[k]; twice {
			c.Errorf("%v: %s twice", did, k)
		}
		if !c.ever[k][v] {
			c.Errorf("%v: %s has %.60q, which it never had", did, k, v)
		}
		found[k] = v
		return nil
	})
	if err != nil {
		c.Errorf("%v: %v", did, err)
		return
	}
	all := maps.Clone(found)
	maps.Copy(all, c.now)
	var lostLog, lostSuper bool
	for _, d := range report.Lost {
		lostLog = lostLog || d.Kind == inspect.DamageLog
		lostSuper = lostSuper || d.Kind == inspect.DamageSuperblock
	}
	back := slices.ContainsFunc(report.Notes, func(n string) bool { return strings.Contains(n, "come back") })
	for k := range all {
		v, is := found[k]
		want, wanted := c.now[k]
		if is == wanted && v == want {
			continue
		}
		covered := slices.ContainsFunc(report.Lost, func(d inspect.Damage) bool {
			return (d.Kind == inspect.DamagePage || d.Kind == inspect.DamageValue) && (d.KeyLower == nil || bytes.Compare(d.KeyLower, []byte(k)) <= 0) && (d.KeyUpper == nil || bytes.Compare([]byte(k), d.KeyUpper) < 0)
		})
		switch {
		case covered:
		case lostSuper: // nothing is known of the tree
		case (lostLog || logToo) && c.inLog[k]:
		case back && is:
		default:
			c.Errorf("%q: %s has %v %.50q, want %v %.50q; lost %+v, notes %q", did, k, is, v, wanted, want, report.Lost, report.Notes)
			return
		}
	}
}

func (c *truth) damage(m *vfs.Mem) string {
	name := dataFile
	if c.rng.IntN(4) == 0 {
		names, _ := m.List(wal.Dir("db"))
		names = slices.DeleteFunc(names, func(n string) bool { return !strings.HasSuffix(n, ".log") })
		if len(names) > 0 {
			name = wal.Dir("db") + "/" + names[c.rng.IntN(len(names))]
		}
	}
	f, err := m.Open(name, vfs.ReadWrite)
	if err != nil {
		c.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	size, _ := f.Size()
	if size < 512 {
		return ""
	}
	page := int64(c.o.Storage.PageSize)
	pages := size / page
	at := c.rng.Int64N(size)
	if c.rng.IntN(6) == 0 {
		at = c.rng.Int64N(min(size, 4*page))
	}
	buf := make([]byte, page)
	switch c.rng.IntN(6) {
	case 0: // a page is zero
		at = at / page * page
		_, _ = f.WriteAt(buf, at)
		return fmt.Sprintf("zeros at %d (page %d) of %s", at, at/page, name)
	case 1: // a write that went elsewhere
		from := c.rng.Int64N(pages) * page
		at = at / page * page
		_, _ = f.ReadAt(buf, from)
		_, _ = f.WriteAt(buf, at)
		return fmt.Sprintf("page %d is page %d in %s", at/page, from/page, name)
	case 2:
		if c.rng.IntN(3) == 0 {
			_ = f.Truncate(at)
			return fmt.Sprintf("cut at %d %s", at, name)
		}
		fallthrough
	default:
		b := buf[:1]
		_, _ = f.ReadAt(b, at)
		b[0] ^= 1 << c.rng.IntN(8)
		_, _ = f.WriteAt(b, at)
		return fmt.Sprintf("bit at %d (page %d) of %s", at, at/page, name)
	}
}
