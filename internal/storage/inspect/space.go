package inspect

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// SpaceOptions configure Space.
type SpaceOptions struct {
	Depth          int    // number of parts of a key in its prefix; at least 1
	Delimiter      []byte // end of a part; "/" if empty
	PagesPerSecond int    // most pages read per second; 0 for no limit
}

// SpaceReport describes one durable state, from a read of every page of the tree.
type SpaceReport struct {
	Epoch    keys.Epoch
	Versions uint64
	LeafFill float64 // the part of the leaves that entries take
	Prefixes []PrefixSpace
	Other    PrefixSpace // all prefixes that are not listed
	Duration time.Duration

	// Pages that could not be read, with the keys that they may have. Of these keys, only those are
	// counted that were written after checkpoints began to skip the page.
	Unreadable      []Damage // at most damagesMax
	UnreadableTotal uint64
}

// PrefixSpace is the space of the keys with one prefix: the newest versions of live keys, with
// their blobs.
type PrefixSpace struct {
	Prefix []byte // of client keys, with the delimiter
	Keys   uint64
	Bytes  uint64
}

// prefixesMax bounds the list of prefixes; the largest ones are listed.
const prefixesMax = 1000

// Space reads the tree of the newest durable state and sums up its keys by prefix. As with Verify,
// checkpoints and writers continue. Pages that cannot be read are reported and left out.
func Space(ctx context.Context, e *storage.Engine, o SpaceOptions) (*SpaceReport, error) {
	state, err := e.PinState(ctx)
	if err != nil {
		return nil, err
	}
	defer state.Release()
	if len(o.Delimiter) == 0 {
		o.Delimiter = []byte("/")
	}
	o.Depth = max(o.Depth, 1)
	s := spaceCounter{state: state, options: o, limiter: readLimiter{began: time.Now(), pagesPerSecond: o.PagesPerSecond}}
	if err := s.count(ctx); err != nil {
		return nil, err
	}
	return s.finish(), nil
}

// spaceCounter sums up one state. Keys arrive in order, so that one prefix is open at a time.
type spaceCounter struct {
	state   *storage.PinnedState
	options SpaceOptions
	limiter readLimiter
	keys    keyCounter
	used    uint64 // bytes of leaves
	leaves  uint64
	open    PrefixSpace
	any     bool // a prefix is open
	report  SpaceReport
}

// count reads the tree, and the repair tree for the ranges of skipped pages; the mirror if a page
// of the repair tree cannot be read. A skipped page is not read, as in every walk, because the
// repair tree has newer versions of its keys.
func (s *spaceCounter) count(ctx context.Context) error {
	if err := s.walk(ctx, s.state.SkippingSource(), s.state.Tree()); err != nil {
		return err
	}
	root, mirror := s.state.RepairTreesInUse()
	if root.Empty() {
		return nil
	}
	s.keys.interrupt()
	if !mirror.Empty() {
		err := btree.Walk(s.state.Source(), root, &btree.Visitor{})
		if stop := unlessDamage(ctx, err); err != nil && stop != nil {
			return stop
		}
		if err != nil {
			root = mirror
		}
	}
	return s.walk(ctx, s.state.Source(), root)
}

// walk counts the entries of a tree.
func (s *spaceCounter) walk(ctx context.Context, src btree.Source, root btree.Root) error {
	return btree.Walk(src, root, &btree.Visitor{
		Page: func(_ page.ID, level int, p []byte) error {
			if err := s.limiter.wait(ctx, s.state.Pages.PagesRead()); err != nil || level > 0 {
				return err
			}
			s.leaf(p)
			return nil
		},
		Damaged: func(id page.ID, _ int, lo, hi *page.Separator, err error) error {
			if stop := unlessDamage(ctx, err); stop != nil {
				return stop
			}
			s.unreadable(id, lo, hi, err)
			return nil
		},
	})
}

// unreadable reports a page that is not counted. If it has the newer versions of a key, the older
// ones on the next page do not count as the newest.
func (s *spaceCounter) unreadable(id page.ID, lo, hi *page.Separator, err error) {
	s.keys.interrupt()
	if hi != nil && hi.Trailer != page.NoTrailer {
		s.keys.skip(hi.Key)
	}
	if s.report.UnreadableTotal++; len(s.report.Unreadable) < damagesMax {
		s.report.Unreadable = append(s.report.Unreadable, damageOfPage(&s.state.DurableState, id, lo, hi, err))
	}
}

func (s *spaceCounter) leaf(p page.Leaf) {
	s.leaves++
	s.used += uint64(p.Used())
	view := p.Layout()
	for i := range view.Count() {
		_, t, value, large := view.At(i)
		newest := s.keys.add(&view, i)
		s.report.Versions++
		if !newest || t.Kind() == keys.KindDelete || keys.SpaceOf(s.keys.key) != keys.SpaceUser {
			continue
		}
		user, size := keys.User(s.keys.key), len(metadata.Value(t.Kind(), value))
		if large {
			size = blob.Length(page.RefOf(value))
		}
		s.enter(user)
		s.open.Keys++
		s.open.Bytes += uint64(len(user) + size)
	}
}

// enter opens the prefix of a key.
func (s *spaceCounter) enter(user []byte) {
	prefix := s.options.prefix(user)
	if s.any && bytes.Equal(prefix, s.open.Prefix) {
		return
	}
	s.end()
	s.open, s.any = PrefixSpace{Prefix: bytes.Clone(prefix)}, true
}

// prefix is the key up to the end of the last part that counts; a key with fewer delimiters up to
// its last delimiter.
func (o *SpaceOptions) prefix(user []byte) []byte {
	end := 0
	for range o.Depth {
		i := bytes.Index(user[end:], o.Delimiter)
		if i < 0 {
			return user[:end] // a part without a delimiter after it is a name, not a prefix
		}
		end += i + len(o.Delimiter)
	}
	return user[:end]
}

// end closes the open prefix. When the list is full, its smaller half is added to the others.
func (s *spaceCounter) end() {
	if !s.any {
		return
	}
	s.report.Prefixes = append(s.report.Prefixes, s.open)
	if len(s.report.Prefixes) >= 2*prefixesMax {
		s.cut()
	}
}

func (s *spaceCounter) cut() {
	s.join()
	p := s.report.Prefixes
	slices.SortFunc(p, func(a, b PrefixSpace) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), bytes.Compare(a.Prefix, b.Prefix))
	})
	keep := min(len(p), prefixesMax)
	for _, q := range p[keep:] {
		s.report.Other.Keys += q.Keys
		s.report.Other.Bytes += q.Bytes
	}
	s.report.Prefixes = p[:keep]
}

// join makes one entry of those with the same prefix: keys without a delimiter are between other
// prefixes.
func (s *spaceCounter) join() {
	p := s.report.Prefixes
	slices.SortFunc(p, func(a, b PrefixSpace) int { return bytes.Compare(a.Prefix, b.Prefix) })
	joined := p[:0]
	for _, q := range p {
		if n := len(joined); n > 0 && bytes.Equal(joined[n-1].Prefix, q.Prefix) {
			joined[n-1].Keys += q.Keys
			joined[n-1].Bytes += q.Bytes
			continue
		}
		joined = append(joined, q)
	}
	s.report.Prefixes = joined
}

func (s *spaceCounter) finish() *SpaceReport {
	s.end()
	s.cut()
	r := &s.report
	r.Epoch, r.Duration = s.state.Pages.State().Epoch, time.Since(s.limiter.began)
	if s.leaves > 0 {
		r.LeafFill = float64(s.used) / float64(s.leaves*uint64(s.state.Pages.PageSize()))
	}
	return r
}
