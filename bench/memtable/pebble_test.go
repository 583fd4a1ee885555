package memtable

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/objstorage/objstorageprovider"
	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/memtable"
)

// pair is a memtable and a Pebble that have taken the same batches, with Pebble's snapshots of some epochs.
type pair struct {
	t         *testing.T
	rnd       *rand.Rand
	table     *memtable.Table
	db        *pebble.DB
	snapshots map[keys.Epoch]*pebble.Snapshot
}

func newPair(t *testing.T) *pair {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	p := &pair{t: t, rnd: rand.New(rand.NewPCG(seed, 0)), snapshots: map[keys.Epoch]*pebble.Snapshot{}}
	var err error
	c := memtable.Config{Bytes: 1 << 20, Prefix: []byte("k")}
	if p.rnd.IntN(2) == 0 {
		c.Heads = p.learned(c)
	}
	if p.table, err = memtable.New(c); err != nil {
		t.Fatal(err)
	}
	if p.db, err = pebble.Open("", &pebble.Options{FS: vfs.NewMem(), MemTableSize: 32 << 20, Logger: quiet{}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, s := range p.snapshots {
			p.must(s.Close())
		}
		p.must(p.db.Close())
		p.must(p.table.Free())
	})
	return p
}

// learned fills a table with such keys as will come, and learns heads from it.
func (p *pair) learned(c memtable.Config) *memtable.Heads {
	table, err := memtable.New(c)
	p.must(err)
	var in memtable.Inserter
	for epoch := range keys.Epoch(4000) {
		var b batch.Builder
		k := p.key()
		b.Set(keys.SpaceOf(k), keys.User(k), nil)
		body, err := b.Finish()
		p.must(err)
		p.must(table.Secure(&in, memtable.MaxSize(body)))
		p.must(table.Apply(&in, body, epoch+1, false))
	}
	heads := table.LearnHeads()
	if heads == nil {
		p.t.Error("nothing was learned")
	}
	p.must(table.Free())
	return heads
}

type quiet struct{}

func (quiet) Infof(string, ...any)              {}
func (quiet) Errorf(string, ...any)             {}
func (quiet) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

func (p *pair) must(err error) {
	if err != nil {
		p.t.Helper()
		p.t.Fatal(err)
	}
}

// key draws keys that often collide, share heads, or lie outside the table's prefix.
func (p *pair) key() []byte {
	switch p.rnd.IntN(10) {
	case 0:
		return []byte{byte(1 + p.rnd.IntN(255))}
	case 1, 2:
		return fmt.Appendf(nil, "kaaaaaaaa%d", p.rnd.IntN(300))
	case 3:
		return append([]byte("k"), make([]byte, p.rnd.IntN(8))...)
	default:
		return fmt.Appendf(nil, "k%x", p.rnd.IntN(1500))
	}
}

// apply commits the same random batch to both at epoch.
func (p *pair) apply(in *memtable.Inserter, epoch keys.Epoch) {
	var b batch.Builder
	w := p.db.NewBatch()
	seen := map[string]bool{}
	for range 1 + p.rnd.IntN(8) {
		k := p.key()
		if seen[string(k)] {
			continue
		}
		seen[string(k)] = true
		if p.rnd.IntN(4) == 0 {
			b.Delete(keys.SpaceOf(k), keys.User(k))
			p.must(w.Delete(k, nil))
			continue
		}
		v := fmt.Appendf(nil, "%s@%d", k, epoch)
		b.Set(keys.SpaceOf(k), keys.User(k), v)
		p.must(w.Set(k, v, nil))
	}
	body, err := b.Finish()
	p.must(err)
	p.must(p.table.Secure(in, memtable.MaxSize(body)))
	p.must(p.table.Apply(in, body, epoch, false))
	p.must(w.Commit(pebble.NoSync))
	if p.rnd.IntN(40) == 0 {
		p.snapshots[epoch] = p.db.NewSnapshot()
	}
}

// cursor reads the table at an epoch as Pebble's iterator reads a snapshot: tombstones and later versions are skipped.
type cursor struct {
	memtable.Iter
	at keys.Epoch
}

func (c *cursor) settle(ok bool, step func() bool) bool {
	for ; ok; ok = step() {
		if r := c.VersionAt(c.at); r.Found() && r.Kind() != keys.KindDelete {
			return true
		}
	}
	return false
}

func (p *pair) compare(what string, it *pebble.Iterator, c *cursor, valid bool) {
	p.t.Helper()
	if it.Valid() != valid {
		p.t.Fatalf("at epoch %d, %s: Pebble is valid: %v, the table %v", c.at, what, it.Valid(), valid)
	}
	if !valid {
		return
	}
	r := c.VersionAt(c.at)
	if !bytes.Equal(it.Key(), c.Key()) || !bytes.Equal(it.Value(), r.Value()) {
		p.t.Fatalf("at epoch %d, %s: Pebble %q=%q, the table %q=%q", c.at, what, it.Key(), it.Value(), c.Key(), r.Value())
	}
}

func TestSnapshotsReadAsPebblesDo(t *testing.T) {
	p := newPair(t)
	var in memtable.Inserter
	const epochs = 2000
	for e := keys.Epoch(1); e <= epochs; e++ {
		p.apply(&in, e)
	}
	if p.snapshots[epochs] == nil { // the last batch may have taken one
		p.snapshots[epochs] = p.db.NewSnapshot()
	}
	for at, snapshot := range p.snapshots {
		it, err := snapshot.NewIter(nil)
		p.must(err)
		c := &cursor{at: at}
		c.Init(p.table)

		it.First()
		for ok := c.settle(c.First(), c.NextKey); ok || it.Valid(); ok = c.settle(c.NextKey(), c.NextKey) {
			p.compare("forward", it, c, ok)
			it.Next()
		}
		it.Last()
		for ok := c.settle(c.LastKey(), c.PrevKey); ok || it.Valid(); ok = c.settle(c.PrevKey(), c.PrevKey) {
			p.compare("backward", it, c, ok)
			it.Prev()
		}
		for range 200 {
			p.seekAndStep(it, c)
		}
		p.must(it.Close())
	}
}

// seekAndStep seeks to a random key in a random direction, then goes forth and back, also off both ends and back again. Only a step further
// out is left out: Pebble does not allow it.
func (p *pair) seekAndStep(it *pebble.Iterator, c *cursor) {
	k := p.key()
	switch p.rnd.IntN(8) { // often beyond all keys, or close to an end
	case 0:
		k = []byte{0}
	case 1:
		k = []byte{255, 255}
	}
	var ok bool
	forward := p.rnd.IntN(2) == 0
	if forward {
		it.SeekGE(k)
		ok = c.settle(c.SeekGE(k), c.NextKey)
	} else {
		it.SeekLT(k)
		ok = c.settle(c.SeekKeyLT(k), c.PrevKey)
	}
	p.compare(fmt.Sprintf("seek %q", k), it, c, ok)
	for n := range 12 {
		if ok {
			forward = p.rnd.IntN(2) == 0
		} else {
			forward = !forward
		}
		if forward {
			it.Next()
			ok = c.settle(c.NextKey(), c.NextKey)
		} else {
			it.Prev()
			ok = c.settle(c.PrevKey(), c.PrevKey)
		}
		p.compare(fmt.Sprintf("seek %q, step %d", k, n), it, c, ok)
	}
}

// Pebble's table writer refuses internal keys that do not ascend by its own order, so it judges the order of versions, their
// trailers included; and its reader must see what the iterator showed.
func TestVersionsComeInPebblesInternalOrder(t *testing.T) {
	p := newPair(t)
	var in memtable.Inserter
	for e := keys.Epoch(1); e <= 1500; e++ {
		p.apply(&in, e)
	}
	fs := vfs.NewMem()
	f, err := fs.Create("versions.sst", vfs.WriteCategoryUnspecified)
	p.must(err)
	w := sstable.NewRawWriter(objstorageprovider.NewFileWritable(f), sstable.WriterOptions{
		Comparer: pebble.DefaultComparer, TableFormat: sstable.TableFormatPebblev2,
	})
	var it memtable.Iter
	it.Init(p.table)
	n := 0
	for ok := it.First(); ok; ok = it.Next() {
		key := pebble.InternalKey{UserKey: it.Key(), Trailer: pebble.InternalKeyTrailer(it.Trailer())}
		if key.SeqNum() != pebble.SeqNum(it.Trailer().Epoch()) {
			t.Fatalf("trailer %x means sequence number %d to Pebble", it.Trailer(), key.SeqNum())
		}
		p.must(w.Add(key, it.Value(), false))
		n++
	}
	p.must(w.Close())
	if n != p.table.Versions() {
		t.Errorf("%d versions iterated, %d in the table", n, p.table.Versions())
	}
	for ok := it.Last(); ok; ok = it.Prev() {
		n--
	}
	if n != 0 {
		t.Errorf("backward differs from forward by %d versions", n)
	}
}
