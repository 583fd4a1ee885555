package inspect

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// Salvage reads what a damaged store still has, and changes nothing. Each line adds to the ones
// before it:
//
//	superblock readable          walk the tree; look for the leaves below damaged inner pages among the live pages
//	superblock damaged           every intact leaf of the file; of several for a key, the newest checkpoint's decides
//	indirection table damaged    rebuild it from the blob pages
//	repair tree                  what was written to the keys of skipped pages
//	quarantine                   what the tree refused
//	log                          every record that can be read
//
// The allocation map tells whether a leaf belongs to the newest state. Without it, the contents of
// leaves that were freed and not overwritten may come back, and those of a bulk load that was refused
// or given up, unless its epoch is newer than the state's. A leaf of a newer checkpoint that
// covers a key overrules them, but only if that leaf is intact, has a version of theirs (else it may
// be left of a repair tree that was given back), and only if there is no repair tree, whose leaves
// have few keys of their ranges. Of the versions that are left the newest counts.

// SalvageReport says what was salvaged and what is lost.
type SalvageReport struct {
	Epoch    keys.Epoch // of the state that was read; zero if no superblock could be read
	Keys     uint64     // written out
	Bytes    uint64     // of their keys and values
	FromTree uint64     // keys found through the tree
	FromScan uint64     // keys found in leaves that no readable parent leads to
	FromLog  uint64
	Expiring uint64 // keys with a deadline
	Leased   uint64 // keys that belong to a lease, which is not salvaged

	Lost      []Damage // ranges of keys, values, and parts of the log that could not be read
	LostTotal uint64
	Notes     []string
}

// Salvaged is a live key with its newest value, the commit sequence number (epoch) of that value, and
// what the version says beside it. The slices are valid during the call.
//
// Salvage passes on what clients wrote, and no records of the store: no leases, and no locks. A key with
// a deadline gets its entry in the expiry queue, and a key with a lease its attachment, from the write
// that puts the key into another store.
type Salvaged struct {
	Key, Value []byte
	Epoch      keys.Epoch
	Metadata   metadata.Fields
}

// SalvageEntry takes what was salvaged of one key.
type SalvageEntry func(e *Salvaged) error

// Salvage passes each live client key that it can read to write, once, in no particular order. The
// store must not be open.
func Salvage(ctx context.Context, fsys vfs.FS, dir string, write SalvageEntry) (report *SalvageReport, err error) {
	files, lock, err := storage.LockFiles(fsys, dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	s := &salvager{ctx: ctx, files: files, write: write, log: map[string]logged{}}
	return &s.report, s.run()
}

type salvager struct {
	ctx    context.Context // of the whole run
	files  storage.Files
	write  SalvageEntry
	report SalvageReport

	state   *storage.DurableState
	blobs   *blob.Store
	mapped  bool              // the allocation map is readable
	reached bitset.Set        // leaves that the walk has read
	gaps    []gap             // ranges that the walk could not read
	log     map[string]logged // newest version of each internal key in log and quarantine
	unsure  []gap             // ranges of the repair tree that could not be read

	beside       []btree.Root        // the repair tree and its mirror: what they have of a key was passed on; nil without any
	besideSource btree.Source        // of their pages
	skipped      *storage.RepairTree // the ranges of their keys; nil if these are not known

	decided []byte // the last internal key whose newest version was found
	value   []byte
	entry   Salvaged // of emit
}

// logged is a version from the log or from the quarantine.
type logged struct {
	epoch    keys.Epoch
	kind     keys.Kind
	metadata metadata.Fields
	value    []byte // without the metadata
}

// gap is a range of internal keys, nil for no bound.
type gap struct{ lower, upper []byte }

func (s *salvager) run() error {
	err := s.open()
	if err != nil {
		return err
	}
	if s.state != nil {
		defer func() { _ = s.state.Close() }() // it was only read
	}
	if err := errors.Join(s.readQuarantine(), s.readLog()); err != nil {
		return err
	}
	if s.state != nil {
		if err := s.readTree(); err != nil {
			return err
		}
	}
	return s.writeLog()
}

// open opens the data file as well as it can be opened.
func (s *salvager) open() error {
	name := s.files.DataPath()
	state, err := s.files.OpenState()
	if err == nil && state.Pages.SuperblockMissing() {
		err = s.refuseOlder(state)
	}
	switch {
	case err == nil:
		s.state, s.report.Epoch = state, state.Pages.State().Epoch
	case errors.Is(err, fs.ErrNotExist):
		s.lose(Damage{Kind: DamageSuperblock, File: name, Reason: "the data file is missing"})
		return nil
	case errors.Is(err, pager.ErrNewerFormat):
		return storage.TranslateError(err)
	default:
		s.lose(Damage{Kind: DamageSuperblock, File: name, Reason: err.Error()})
		if s.state, err = s.files.OpenUnknownState(); err != nil {
			s.note("%v: nothing can be read from it", err)
			return nil
		}
		s.note("no superblock is readable: every intact leaf of the file was read, and deleted keys, or keys of a bulk load that failed, may have come back")
	}
	if damaged := s.state.Pages.SuperblockDamage(); damaged != nil {
		s.note("%v", damaged)
	}
	return nil
}

// refuseOlder closes a state whose successor was durable and has lost its superblock; the log
// proves it by not reaching back to this state. The pages of both states together, with the newer
// ones first, have more.
func (s *salvager) refuseOlder(state *storage.DurableState) error {
	_, err := wal.Replay(s.files.FS, s.files.Dir, state.Pages.State().Epoch, wal.Proof{}, func(keys.Epoch, []byte) error { return s.ctx.Err() })
	if _, gap := errors.AsType[*wal.CorruptionError](err); !gap {
		return s.ctx.Err()
	}
	return errors.Join(state.ExplainLog(err), state.Close())
}

// raw reports whether no superblock can be read, so that nothing is known of the tree.
func (s *salvager) raw() bool { return s.state.Pages.State().Root == 0 && s.report.Epoch == 0 }

// readTree walks what can be walked, and scans the file for the rest.
func (s *salvager) readTree() error {
	if err := s.state.Pages.ReadMap(); err != nil {
		if stop := unlessDamage(s.ctx, err); stop != nil {
			return stop
		}
		s.note("the allocation map is not readable: %v", err)
	} else {
		s.mapped = !s.raw()
	}
	if err := s.openBlobs(); err != nil {
		return err
	}
	if s.raw() {
		s.gaps = []gap{{}}
	} else if err := errors.Join(s.readRepairTree(), s.walk()); err != nil {
		return err
	}
	if len(s.gaps) == 0 {
		return nil
	}
	if !s.mapped && !s.raw() {
		s.note("below damaged inner pages every intact leaf of the file was read, and deleted keys, or keys of a bulk load that failed, may have come back")
	}
	return s.scan()
}

// openBlobs opens the blob store, or rebuilds it from all pages.
func (s *salvager) openBlobs() (err error) {
	if !s.raw() {
		if s.blobs, err = blob.Open(&s.state.Pages.Reader); err == nil {
			return nil
		}
		if stop := unlessDamage(s.ctx, err); stop != nil {
			return stop
		}
		s.note("the indirection table of the blobs cannot be read and was rebuilt: %v", err)
	}
	s.blobs, err = blob.Rebuild(&s.state.Pages.Reader, s.eachPage)
	return err
}

// eachPage reads every intact page.
func (s *salvager) eachPage(each func(id page.ID, buf []byte)) error {
	buf := vfs.AlignedBuffer(s.state.Pages.PageSize())
	for id := range s.state.Pages.PageCount() {
		if id%64 == 0 && s.ctx.Err() != nil {
			return s.ctx.Err()
		}
		if s.state.ReadPage(id, buf) == nil {
			each(id, buf)
		}
	}
	return nil
}

func (s *salvager) walk() error {
	s.decided = nil
	return s.walkTree(s.state.Tree(), &s.gaps, func(p page.Leaf) error {
		return s.eachNewest(p, func(key []byte, v *found) error { return s.take(key, []found{*v}, &s.report.FromTree) })
	})
}

// walkTree calls leaf for each leaf that can be read, and reports the keys that the rest may hide.
// Inner pages leave gaps.
func (s *salvager) walkTree(root btree.Root, gaps *[]gap, leaf func(p page.Leaf) error) error {
	return btree.Walk(s.state.Source(), root, &btree.Visitor{
		Page: func(id page.ID, level int, p []byte) error {
			if level > 0 {
				return s.ctx.Err()
			}
			s.reached.Add(int(id))
			return leaf(p)
		},
		Damaged: func(id page.ID, level int, lo, hi *page.Separator, err error) error {
			if stop := unlessDamage(s.ctx, err); stop != nil {
				return stop
			}
			lower, upper := storage.ClientKeys(lo, hi)
			s.lose(Damage{
				Kind: DamagePage, File: s.state.Pages.Name(), Page: id, Offset: int64(id) * int64(s.state.Pages.PageSize()),
				KeyLower: lower, KeyUpper: upper, Reason: err.Error(),
			})
			if level > 0 || gaps != &s.gaps {
				*gaps = append(*gaps, gap{gapBound(lo), gapBound(hi)})
			}
			if hi != nil && hi.Trailer != page.NoTrailer {
				s.decided = append(s.decided[:0], hi.Key...) // its newest version is on this page; the versions after it are older
			}
			return nil
		},
	})
}

// gapBound is a bound of a gap. If a key has versions on both sides of the separator, the newest
// one is before it.
func gapBound(s *page.Separator) []byte {
	if s == nil {
		return nil
	}
	key := bytes.Clone(s.Key)
	if s.Trailer != page.NoTrailer {
		key = append(key, 0)
	}
	return key
}

// take passes on the newest version of a key in the trees, of which there are one or more copies.
// It does not if the log has a newer one, or if what could not be read may have.
func (s *salvager) take(key []byte, copies []found, count *uint64) error {
	v := &copies[0]
	// The same version is in the repair tree and in its mirror. One of them was passed on with its
	// value. The leaves of the other may come from the scan, and their value may be damaged.
	if other, ok := s.log[string(key)]; ok && other.epoch >= v.epoch || inGap(s.unsure, key) {
		return nil
	}
	if beside, err := s.isBeside(key); beside || err != nil {
		return err
	}
	delete(s.log, string(key))
	if v.kind == keys.KindDelete || keys.SpaceOf(key) != keys.SpaceUser {
		return nil
	}
	value, f, ok, err := s.valueOf(key, copies)
	if !ok {
		return err
	}
	*count++
	return s.emit(key, value, v.epoch, &f)
}

// found is a version in a leaf.
type found struct {
	epoch keys.Epoch
	kind  keys.Kind
	large bool
	bytes []byte
}

// eachNewest calls each for the newest version of every key of a leaf. Leaves are passed in key
// order.
func (s *salvager) eachNewest(p page.Leaf, each func(key []byte, v *found) error) error {
	view := p.Layout()
	var key []byte
	for i := range view.Count() {
		suffix, t, value, large := view.At(i)
		if i == 0 || len(suffix) > 0 {
			key = append(append(key[:0], view.Prefix()...), suffix...)
		}
		if bytes.Equal(key, s.decided) {
			continue
		}
		s.decided = append(s.decided[:0], key...)
		if err := each(key, &found{t.Epoch(), t.Kind(), large, value}); err != nil {
			return err
		}
	}
	return nil
}

// valueOf is the value of a version with its metadata, unless the value is damaged in every copy.
func (s *salvager) valueOf(key []byte, copies []found) (value []byte, f metadata.Fields, ok bool, err error) {
	for i := range copies {
		inLeaf, f := s.split(key, copies[i].kind, copies[i].bytes)
		if !copies[i].large {
			return inLeaf, f, true, nil
		}
		s.value, err = s.blobs.Append(s.value[:0], page.RefOf(inLeaf), s.blobs.Direct())
		if err == nil {
			return s.value, f, true, nil
		}
		if stop := unlessDamage(s.ctx, err); stop != nil {
			return nil, f, false, stop
		}
	}
	s.loseValue(key, err)
	return nil, f, false, nil
}

// split divides what is stored of a version into its value and its metadata. Metadata that this program
// cannot read costs the key nothing else.
func (s *salvager) split(key []byte, kind keys.Kind, stored []byte) (value []byte, f metadata.Fields) {
	f, err := metadata.Read(kind, stored)
	if err != nil {
		s.note("the metadata of %q cannot be read, and was left out: %v", keys.User(key), err)
	}
	if metadata.Check(kind, stored) != nil {
		return stored, f
	}
	return metadata.Value(kind, stored), f
}

func (s *salvager) emit(key, value []byte, epoch keys.Epoch, f *metadata.Fields) error {
	s.report.Keys++
	s.report.Bytes += uint64(len(key) - 1 + len(value))
	if f.ExpiresAt != 0 {
		s.report.Expiring++
	}
	if f.Lease != 0 {
		s.report.Leased++
	}
	s.entry = Salvaged{Key: keys.User(key), Value: value, Epoch: epoch, Metadata: *f}
	return s.write(&s.entry)
}

func (s *salvager) loseValue(key []byte, err error) {
	user := bytes.Clone(keys.User(key))
	s.lose(Damage{Kind: DamageValue, File: s.state.Pages.Name(), KeyLower: user, KeyUpper: append(bytes.Clone(user), 0), Reason: err.Error()})
}

func (s *salvager) lose(d Damage) {
	if s.report.LostTotal++; len(s.report.Lost) < damagesMax {
		s.report.Lost = append(s.report.Lost, d)
	}
}

// notesMax bounds the notes: each key may cause one.
const notesMax = 100

func (s *salvager) note(format string, args ...any) {
	if len(s.report.Notes) == notesMax {
		return
	}
	s.report.Notes = append(s.report.Notes, fmt.Sprintf(format, args...))
}
