package enginetest

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestSalvageAndRecoveryAgree crashes a store repeatedly, so that its log has torn tails and skip
// records, with bulk loads, range deletes and asynchronous commits in between. After each crash the
// files are verified, salvaged and opened, and then again with a damaged part of the log or a
// damaged superblock. Salvage restores the content that the store shows, completely if the store
// opens, and never a commit that an earlier crash has removed.
func TestSalvageAndRecoveryAgree(t *testing.T) {
	base := testseed.Base(t)
	opened, refused := 0, 0
	for run := range uint64(max(*sideSeeds/exhaustiveStep/2, 1)) {
		seed := base + run
		c := &crashStory{t: t, rng: rand.New(rand.NewPCG(seed, 23)), seed: seed, values: map[string]keys.Epoch{}, lost: map[string]bool{}}
		c.o = modelOptions(vfs.NewMem())
		if c.rng.IntN(2) == 0 {
			c.o.Storage.DiskReserve = storage.DiskReserveDerived
		}
		for range 6 {
			c.session()
			c.examine()
		}
		opened, refused = opened+c.opened, refused+c.refused
	}
	if opened == 0 || refused == 0 {
		t.Errorf("%d damaged stores opened, %d refused: the test tests nothing", opened, refused)
	}
	t.Logf("%d damaged stores opened, %d refused", opened, refused)
}

type crashStory struct {
	t      *testing.T
	rng    *rand.Rand
	seed   uint64
	o      mvcc.Options
	n      int
	values map[string]keys.Epoch // that the last session wrote
	lost   map[string]bool       // values that a crash took

	opened, refused int
}

// session opens the store, writes, and ends with a crash or with Close.
func (c *crashStory) session() {
	s := mustReopen(c.t, c.o)
	for v, e := range c.values {
		if e > s.Recovery().Epoch {
			c.lost[v] = true
		}
	}
	clear(c.values)
	x := mustSession(c.t, s)
	for range c.rng.IntN(120) {
		c.write(s, x)
	}
	x.Close()
	fs := c.o.Storage.FS.(*vfs.Mem)
	if c.rng.IntN(5) == 0 {
		mustClose(c.t, s)
		return
	}
	c.o.Storage.FS = fs.Crash(c.rng.Uint64(), []vfs.Survival{vfs.SurviveSome, vfs.SurviveNone, vfs.SurviveAll}[c.rng.IntN(3)])
	_ = s.Close()
}

func (c *crashStory) write(s *mvcc.Store, x *session) {
	c.n++
	k, v := fmt.Sprintf("key-%03d", c.rng.IntN(100)), fmt.Sprintf("%d %s", c.n, strings.Repeat("v", c.rng.IntN(200)))
	w := mvcc.Write{Durability: []mvcc.Durability{mvcc.DurabilitySync, mvcc.DurabilityAsync, mvcc.DurabilityAsync}[c.rng.IntN(3)]}
	switch c.rng.IntN(40) {
	case 0:
		if err := s.Checkpoint(context.Background()); err != nil {
			c.t.Fatal(err)
		}
		return
	case 1:
		if c.rng.IntN(3) == 0 {
			c.values[v] = mustLoad(c.t, s, map[string]string{k: v, k + "x": v, k + "y": v}).Epoch
		}
		return
	case 2:
		if _, err := x.DeleteRange(context.Background(), mvcc.RangeDelete{Lower: []byte(k), Upper: []byte(k + "~"), Durability: w.Durability}); err != nil {
			c.t.Fatal(err)
		}
		return
	case 3, 4, 5, 6:
		w.Delete([]byte(k))
	default:
		w.Set([]byte(k), []byte(v))
	}
	e, err := commitAndWait(x, &w)
	if err != nil {
		c.t.Fatal(err)
	}
	c.values[v] = e
}

// examine checks the files, as they are and with damage.
func (c *crashStory) examine() {
	files := mustRead(c.t, c.o.Storage.FS)
	if _, ok := c.look(files, "undamaged"); !ok {
		c.t.Fatalf("seed %d: the store does not open after a crash", c.seed)
	}
	for range 6 {
		damaged, what := c.damage(files)
		if _, ok := c.look(damaged, what); ok {
			c.opened++
		} else {
			c.refused++
		}
	}
}

// look verifies, salvages and opens the files, and compares the results.
func (c *crashStory) look(files image, what string) (shown map[string]string, opens bool) {
	c.t.Helper()
	fail := func(format string, args ...any) {
		c.t.Helper()
		c.t.Fatalf("seed %d, write %d, %s: %s", c.seed, c.n, what, fmt.Sprintf(format, args...))
	}
	verified, err := inspect.VerifyDir(context.Background(), files.files(c.t), "db", inspect.VerifyOptions{})
	if err != nil {
		fail("verify: %v", err)
	}
	got, report := mustSalvage(c.t, files.files(c.t))
	o := c.o
	o.Storage.FS = files.files(c.t)
	s, err := mvcc.Open(o)
	if err != nil {
		if !asDamage(err) || verified.OK() || report.LostTotal == 0 {
			fail("open: %v; verified %+v, salvaged %+v", err, verified, report)
		}
	} else {
		shown = dump(c.t, s)
		if err := equalMaps(shown, got); err != nil {
			fail("salvage and the store differ: %v; report %+v, recovery %+v", err, report, s.Recovery())
		}
		if !verified.OK() && !strings.Contains(what, "superblock") || report.LostTotal > 0 {
			fail("the store opens; verified %+v, salvaged %+v", verified, report)
		}
		if err := s.Close(); err != nil {
			fail("close: %v", err)
		}
	}
	for k, v := range got {
		if c.lost[v] {
			fail("salvage brings out %q = %.20q, of a commit that a crash took; %+v", k, v, report)
		}
	}
	return shown, err == nil
}

// damage changes a file of the log or of the superblocks.
func (c *crashStory) damage(files image) (image, string) {
	damaged := maps.Clone(files)
	if c.rng.IntN(6) == 0 {
		data := slices.Clone(files[dataFile])
		data[c.rng.IntN(2)*c.o.Storage.PageSize+c.rng.IntN(c.o.Storage.PageSize)] ^= 1
		damaged[dataFile] = data
		return damaged, "a bit of a superblock"
	}
	var logs []string
	for name := range files {
		if path.Ext(name) == ".log" {
			logs = append(logs, name)
		}
	}
	slices.Sort(logs)
	name := logs[c.rng.IntN(len(logs))]
	log := slices.Clone(files[name])
	at := 0
	if n := c.written(log); n > 0 {
		at = c.rng.IntN(n)
	}
	switch c.rng.IntN(4) {
	case 0:
		delete(damaged, name)
		return damaged, "without " + name
	case 1:
		damaged[name] = log[:at]
		return damaged, fmt.Sprintf("%s cut at %d", name, at)
	case 2:
		clear(log[at&^511 : min(at&^511+512, len(log))])
		damaged[name] = log
		return damaged, fmt.Sprintf("%s without the sector at %d", name, at&^511)
	}
	if len(log) > 0 {
		log[at] ^= 1 << c.rng.IntN(8)
	}
	damaged[name] = log
	return damaged, fmt.Sprintf("a bit of %s at %d", name, at)
}

// written is the offset after the last byte that is not zero.
func (c *crashStory) written(log []byte) int {
	return len(strings.TrimRight(string(log), "\x00"))
}
