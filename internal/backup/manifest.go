package backup

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/page"
)

const (
	manifestFormat   = 3 // 2 has no table; 1 has no table either, and no parts of version 2
	formatWithTable  = 3
	manifestBytesMax = 256 << 20 // a million parts
	objectBytesMax   = 1 << 30   // of a part, which is in memory as a whole: many times what is written

	quarantineBytesMax = 256 << 20 // more than a quarantine file can have

	manifestsDir = "base/manifests/"
	partsDir     = "base/parts/"
	deletedDir   = "base/deleted/"
	jobsDir      = "base/jobs/"
	restoresDir  = "restores/" // leases of restores, below the lineage; see Prune
)

// Kind says which pages a backup has.
type Kind string

// The kinds of backups.
const (
	Full        Kind = "full"
	Incremental Kind = "incremental"
)

// Manifest describes a backup. Its JSON form is the object, in the order of these fields. Unknown fields are an error, because a
// format that adds some has another number.
type Manifest struct {
	Format  int       `json:"format"`
	ID      string    `json:"id"`
	Kind    Kind      `json:"kind"`
	Created time.Time `json:"created"` // when the manifest was made
	State   State     `json:"state"`
	Base    *Base     `json:"base,omitempty"` // of an incremental backup

	Pages      uint64      `json:"pages"`           // in this backup
	LivePages  uint64      `json:"live_pages"`      // of the state, without superblocks
	Digest     string      `json:"digest"`          // SHA-256 over id and checksum of every live page; see digest
	Parts      []Part      `json:"parts"`           // in ascending order of pages
	Table      []Part      `json:"table,omitempty"` // parts with the page table; from format 3 on
	Quarantine *Quarantine `json:"quarantine,omitempty"`
	Damaged    []uint64    `json:"damaged,omitempty"` // pages that could not be read and are missing
	Program    string      `json:"program"`           // version that made the backup

	name string // of the object, below the lineage
}

// State describes the state that was copied. Everything but the superblock is for programs that cannot decode that.
type State struct {
	Lineage      string `json:"lineage"` // zeros at the oldest feature level
	StoreID      string `json:"store_id"`
	Epoch        uint64 `json:"epoch"`
	Term         uint64 `json:"term"`
	CommitTimeUs int64  `json:"commit_time_us"` // zero if it is not known
	FeatureLevel uint32 `json:"feature_level"`
	Checkpoint   uint64 `json:"checkpoint"`
	PageSize     int    `json:"page_size"`
	PageCount    uint64 `json:"page_count"`
	Superblock   []byte `json:"superblock"`
}

// Base names the backup that an incremental one needs.
type Base struct {
	ID         string `json:"id"`
	SHA256     string `json:"sha256"` // of its manifest
	Checkpoint uint64 `json:"checkpoint"`
}

// Part is a part of a backup.
type Part struct {
	SHA256 string `json:"sha256"`
	Bytes  int64  `json:"bytes"`
	Pages  uint64 `json:"pages"`
	First  uint64 `json:"first"` // the first and the last page
	Last   uint64 `json:"last"`
}

// Quarantine is the part with the quarantine file.
type Quarantine struct {
	SHA256 string `json:"sha256"`
	Bytes  int64  `json:"bytes"`
	File   int    `json:"file"` // the number in the superblock
}

// Bytes is the size of the backup's parts.
func (m *Manifest) Bytes() (n int64) {
	for _, object := range m.objects() {
		n += object.Bytes
	}
	return n
}

// object is what a manifest says of an object of its backup.
type object struct {
	SHA256 string
	Bytes  int64
}

// objects are all parts of a backup, with those of its page table and of the quarantine.
func (m *Manifest) objects() []object {
	all := make([]object, 0, len(m.Parts)+len(m.Table)+1)
	for i := range m.Parts {
		all = append(all, object{m.Parts[i].SHA256, m.Parts[i].Bytes})
	}
	for i := range m.Table {
		all = append(all, object{m.Table[i].SHA256, m.Table[i].Bytes})
	}
	if m.Quarantine != nil {
		all = append(all, object{m.Quarantine.SHA256, m.Quarantine.Bytes})
	}
	return all
}

// PartCount is the number of the backup's parts, but for that of the quarantine.
func (m *Manifest) PartCount() uint64 { return uint64(len(m.Parts) + len(m.Table)) }

// Epoch is the epoch of the state.
func (m *Manifest) Epoch() keys.Epoch { return keys.Epoch(m.State.Epoch) }

// CommitTime is the latest commit time up to the epoch; zero if it is not known.
func (m *Manifest) CommitTime() time.Time {
	if m.State.CommitTimeUs == 0 {
		return time.Time{}
	}
	return time.UnixMicro(m.State.CommitTimeUs).UTC()
}

// SHA256 is the hash of the manifest, which is in its name.
func (m *Manifest) SHA256() string { return m.name[strings.LastIndexByte(m.name, '.')+1:] }

// Dir is the directory of a lineage in a target. A store of the oldest feature level has none, and uses its identity.
func Dir(lineage keys.Lineage, storeID [16]byte) string {
	if lineage == (keys.Lineage{}) {
		return oldestPrefix + hex.EncodeToString(storeID[:])
	}
	return lineage.String()
}

// oldestPrefix begins the directory of a store without a lineage.
const oldestPrefix = "store-"

// IsOldest reports whether a directory is that of a store of the oldest feature level, which has no lineage and no log archive.
func IsOldest(dir string) bool {
	id, ok := strings.CutPrefix(dir, oldestPrefix)
	raw, err := hex.DecodeString(id)
	return ok && err == nil && len(raw) == len(storage.CopyInfo{}.StoreID)
}

// dir is the directory to which the manifest belongs.
func (m *Manifest) dir() string {
	if strings.Trim(m.State.Lineage, "0") == "" {
		return oldestPrefix + m.State.StoreID
	}
	return m.State.Lineage
}

func partName(dir, sum string) string { return path.Join(dir, partsDir, sum) }

// encode returns the object of a manifest, and sets its name.
func (m *Manifest) encode() ([]byte, error) {
	p, err := json.MarshalIndent(m, "", " ")
	if err != nil {
		return nil, err
	}
	p = append(p, '\n')
	sum := sha256.Sum256(p)
	m.name = manifestsDir + m.ID + "." + hex.EncodeToString(sum[:])
	return p, nil
}

// decodeManifest decodes the object with this name, below the lineage.
func decodeManifest(name string, p []byte) (*Manifest, error) {
	id, sum, _ := strings.Cut(path.Base(name), ".")
	if got := sha256.Sum256(p); hex.EncodeToString(got[:]) != sum {
		return nil, fmt.Errorf("%w: manifest %s: its bytes have the SHA-256 %x", ErrDamaged, name, got)
	}
	var version struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(p, &version); err != nil {
		return nil, fmt.Errorf("%w: manifest %s: %w", ErrDamaged, name, err)
	}
	if version.Format < 1 || version.Format > manifestFormat {
		return nil, fmt.Errorf("%w: manifest %s has format %d, this program knows %d", ErrNewerFormat, name, version.Format, manifestFormat)
	}
	m := &Manifest{name: name}
	d := json.NewDecoder(bytes.NewReader(p))
	d.DisallowUnknownFields()
	if err := d.Decode(m); err != nil {
		return nil, fmt.Errorf("%w: manifest %s: %w", ErrDamaged, name, err)
	}
	if err := m.check(id); err != nil {
		return nil, fmt.Errorf("%w: manifest %s: %w", ErrDamaged, name, err)
	}
	return m, nil
}

// check compares what a manifest says more than once.
func (m *Manifest) check(id string) error {
	info, err := storage.DescribeCopy(m.State.Superblock)
	if err != nil {
		return err
	}
	described := describe(&info)
	switch {
	case m.ID != id:
		return fmt.Errorf("it says that it is %s", m.ID)
	case !sameState(&m.State, &described):
		return errors.New("the superblock is of another state")
	case m.Kind != Full && m.Kind != Incremental || (m.Kind == Incremental) != (m.Base != nil):
		return fmt.Errorf("impossible kind %q", m.Kind)
	}
	for _, object := range m.objects() {
		if object.Bytes < 0 || object.Bytes > objectBytesMax {
			return fmt.Errorf("part %s has %d bytes", object.SHA256, object.Bytes)
		}
	}
	pages := uint64(0)
	for i := range m.Parts {
		pages += m.Parts[i].Pages
	}
	if pages != m.Pages {
		return fmt.Errorf("its parts have %d pages, it says %d", pages, m.Pages)
	}
	listed, want := uint64(0), uint64(0)
	for i := range m.Table {
		if listed += m.Table[i].Pages; m.Table[i].Pages > tablePages { // which are in memory at once
			return fmt.Errorf("a part of its page table has %d pages", m.Table[i].Pages)
		}
	}
	if m.hasTable() {
		want = m.LivePages
	}
	if listed != want {
		return fmt.Errorf("its page table has %d pages instead of %d", listed, want)
	}
	return nil
}

// isDamaged reports whether a page could not be read when the backup was made.
func (m *Manifest) isDamaged(id page.ID) bool {
	_, is := slices.BinarySearch(m.Damaged, uint64(id))
	return is
}

// hasTable reports whether backups of this format have a page table. That of a state without pages has no part.
func (m *Manifest) hasTable() bool { return m.Format >= formatWithTable }

func sameState(a, b *State) bool {
	return a.Lineage == b.Lineage && a.StoreID == b.StoreID && a.Epoch == b.Epoch && a.Term == b.Term && a.CommitTimeUs == b.CommitTimeUs &&
		a.FeatureLevel == b.FeatureLevel && a.Checkpoint == b.Checkpoint && a.PageSize == b.PageSize && a.PageCount == b.PageCount
}

// describe is the part of a manifest that follows from the superblock.
func describe(info *storage.CopyInfo) State {
	s := State{
		Lineage: info.History.Lineage.String(), StoreID: hex.EncodeToString(info.StoreID[:]), Epoch: uint64(info.Epoch), Term: uint64(info.History.Term),
		FeatureLevel: uint32(info.FeatureLevel), Checkpoint: info.Checkpoint, PageSize: info.PageSize, PageCount: uint64(info.PageCount),
	}
	if at := info.History.CommitTime; !at.IsZero() {
		s.CommitTimeUs = at.UnixMicro()
	}
	return s
}

// Dirs returns the directories of a target that have backups, in ascending order.
func Dirs(ctx context.Context, store objectstore.Store) (dirs []string, err error) {
	err = store.List(ctx, "", func(o objectstore.Object) error {
		dir, rest, _ := strings.Cut(o.Name, "/")
		if strings.HasPrefix(rest, manifestsDir) && (len(dirs) == 0 || dirs[len(dirs)-1] != dir) {
			dirs = append(dirs, dir)
		}
		return nil
	})
	return dirs, err
}

// readObject reads the object of a manifest whole. A larger one than expected is damage.
func readObject(ctx context.Context, store objectstore.Store, name string) ([]byte, error) {
	into := new(bytes.Buffer)
	err := readInto(ctx, store, name, manifestBytesMax, into)
	return into.Bytes(), err
}

// readInto replaces what a buffer has by an object.
func readInto(ctx context.Context, store objectstore.Store, name string, bytesMax int64, into *bytes.Buffer) (err error) {
	r, err := store.Read(ctx, name, 0, -1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	into.Reset()
	n, err := into.ReadFrom(io.LimitReader(r, bytesMax+1))
	if err == nil && n > bytesMax {
		err = fmt.Errorf("%w: %s has more than %d bytes", ErrDamaged, name, bytesMax)
	}
	return err
}

// List returns the backups below a lineage's directory, oldest first. A manifest that cannot be read is in broken, and hides no other.
func List(ctx context.Context, store objectstore.Store, dir string) (all []*Manifest, broken []*ManifestError, err error) {
	names, err := list(ctx, store, path.Join(dir, manifestsDir)+"/")
	if err != nil {
		return nil, nil, err
	}
	for _, o := range names {
		m, err := readManifest(ctx, store, dir, strings.TrimPrefix(o.Name, dir+"/"))
		switch {
		case err == nil:
			all = append(all, m)
		case errors.Is(err, objectstore.ErrNotFound): // pruned meanwhile
		case errors.Is(err, ErrDamaged), errors.Is(err, ErrNewerFormat), errors.Is(err, storage.ErrNewerFormat):
			broken = append(broken, manifestError(ctx, store, dir, o.Name, err))
		default:
			return nil, nil, err
		}
	}
	slices.SortStableFunc(all, func(a, b *Manifest) int {
		return cmp.Or(cmp.Compare(a.State.Epoch, b.State.Epoch), cmp.Compare(a.ID, b.ID))
	})
	return all, broken, nil
}

// Newest returns the newest backup below a lineage's directory. If the manifest of a newer one cannot be read, or none can be, the error is that of
// the manifest; without any it is ErrNoBackup.
func Newest(ctx context.Context, store objectstore.Store, dir string) (*Manifest, error) {
	all, broken, err := List(ctx, store, dir)
	switch {
	case err != nil:
		return nil, err
	case len(all) == 0 && len(broken) > 0:
		return nil, broken[0]
	case len(all) == 0:
		return nil, fmt.Errorf("%w: %s has no backups in %s", ErrNoBackup, store, dir)
	}
	newest := all[len(all)-1]
	for _, b := range broken {
		if b.NewerThan(newest.ID, newest.Epoch()) {
			return nil, fmt.Errorf("backup %s is newer than %s, the newest one that can be read: %w", b.ID, newest.ID, b)
		}
	}
	return newest, nil
}

func readManifest(ctx context.Context, store objectstore.Store, dir, name string) (*Manifest, error) {
	p, err := readObject(ctx, store, path.Join(dir, name))
	if errors.Is(err, objectstore.ErrUnreadable) {
		err = fmt.Errorf("%w: manifest %s: %w", ErrDamaged, name, err)
	}
	if err != nil {
		return nil, err
	}
	return decodeManifest(name, p)
}

// list collects what is below a prefix.
func list(ctx context.Context, store objectstore.Store, prefix string) (all []objectstore.Object, err error) {
	err = store.List(ctx, prefix, func(o objectstore.Object) error {
		all = append(all, o)
		return nil
	})
	return all, err
}

// ErrNoBackup means that a target does not have a backup.
var ErrNoBackup = errors.New("backup: no such backup")

// Chain returns the backups that a restore of m needs, the full one first.
func Chain(ctx context.Context, store objectstore.Store, m *Manifest) (chain []*Manifest, err error) {
	chain = []*Manifest{m}
	for b := m; b.Base != nil; {
		name := manifestsDir + b.Base.ID + "." + b.Base.SHA256
		base, err := readManifest(ctx, store, m.dir(), name)
		if errors.Is(err, objectstore.ErrNotFound) {
			return nil, fmt.Errorf("%w: %s is the base of %s: %w", ErrNoBackup, b.Base.ID, b.ID, err)
		}
		if err != nil {
			return nil, err
		}
		if why := b.unfitBase(base); why != "" {
			return nil, fmt.Errorf("%w: %s cannot be the base of %s: %s", ErrDamaged, base.ID, b.ID, why)
		}
		chain = append(chain, base)
		b = base
	}
	slices.Reverse(chain)
	return chain, nil
}

// unfitBase says why a backup cannot be the base of m, or "".
func (m *Manifest) unfitBase(base *Manifest) string {
	switch {
	case base.State.StoreID != m.State.StoreID:
		return "it is of another store, or of the time before a restore"
	case base.State.Lineage != m.State.Lineage:
		return "it is of another history"
	case base.State.PageSize != m.State.PageSize:
		return "it has another page size"
	case base.State.Checkpoint > m.State.Checkpoint || base.State.Epoch > m.State.Epoch:
		return "it is newer"
	case len(base.Damaged) > 0:
		return "pages of it are damaged"
	case m.Base != nil && m.Base.Checkpoint != base.State.Checkpoint:
		return "it is of another checkpoint"
	}
	return ""
}
