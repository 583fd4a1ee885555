package archive

import (
	"cmp"
	"context"
	"errors"
	"io"
	"path"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
)

// A file *covers* another one if it has all of its epochs. A merged file covers its parts until they are deleted, and has the same records;
// a file of another history that has the same epochs has other ones.

// cover is a file that no other one covers, and the files that it covers.
type cover struct {
	file
	inside []file
}

// covers divides files, in the order of their first epochs.
func covers(all []file) (list []cover) {
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b file) int {
		return cmp.Or(cmp.Compare(a.first, b.first), cmp.Compare(b.last, a.last), cmp.Compare(a.name, b.name))
	})
	for _, f := range all {
		if n := len(list); n > 0 && f.last <= list[n-1].last {
			list[n-1].inside = append(list[n-1].inside, f)
		} else {
			list = append(list, cover{file: f})
		}
	}
	return list
}

// distinct are the files without those of which it is sure that another one has the same records.
func (p *place) distinct(ctx context.Context, all []file) (rest []file, err error) {
	for _, c := range covers(all) {
		rest = append(rest, c.file)
		if len(c.inside) == 0 {
			continue
		}
		unsure, err := p.unsure(ctx, &c)
		if err != nil {
			return nil, err
		}
		rest = append(rest, unsure...)
	}
	slices.SortFunc(rest, func(a, b file) int { return cmp.Compare(a.name, b.name) })
	return rest, nil
}

// unsure are the files inside of a cover of which it is not sure that they have the same records as it. If they are all the parts that it
// was made of, one end of each is enough. Otherwise the file is read: some parts were deleted, for instance.
func (p *place) unsure(ctx context.Context, c *cover) ([]file, error) {
	list := append([]file{c.file}, c.inside...)
	infos, errs, err := p.infos(ctx, list)
	if err != nil {
		return nil, err
	}
	known := map[string]*Info{}
	for i := range list {
		if errs[i] == nil {
			known[list[i].name] = &infos[i]
		}
	}
	unsure := notTiled(c, known)
	if len(unsure) == 0 {
		return nil, nil
	}
	rest, err := p.others(ctx, &cover{c.file, unsure}, known)
	if err != nil && ofFile(err) {
		return unsure, nil // what is wrong with it is an error if it is needed
	}
	return rest, err
}

// notTiled are the files inside of a cover that it was not made of: all of them, unless the largest ones are together what it is, by their
// links and counts.
func notTiled(c *cover, known map[string]*Info) (rest []file) {
	parts := covers(c.inside)
	list := make([]Info, 0, len(parts))
	for i := range parts {
		if known[parts[i].name] == nil {
			return c.inside
		}
		list = append(list, *known[parts[i].name])
	}
	whole := known[c.name]
	if whole == nil || !follow(list) {
		return c.inside
	}
	if united := unite(list); united.withoutSize() != whole.withoutSize() {
		return c.inside
	}
	for i := range parts {
		rest = append(rest, notTiled(&parts[i], known)...)
	}
	return rest
}

// follow reports whether each file follows the one before.
func follow(list []Info) bool {
	for i := 1; i < len(list); i++ {
		if list[i].Begin != Linked || list[i].Link != list[i-1].Last {
			return false
		}
	}
	return len(list) > 0
}

// unite describes the records of files that follow each other. Bytes and SHA256 are those of no file.
func unite(list []Info) Info {
	u := list[0]
	for _, i := range list[1:] {
		u.Count, u.Loads, u.RawBytes, u.Last = u.Count+i.Count, u.Loads+i.Loads, u.RawBytes+i.RawBytes, i.Last
		if u.Oldest.IsZero() || !i.Oldest.IsZero() && i.Oldest.Before(u.Oldest) {
			u.Oldest = i.Oldest
		}
		if i.Newest.After(u.Newest) {
			u.Newest = i.Newest
		}
	}
	u.Header.Loads = u.Loads > 0
	return u
}

// withoutSize is what two files with the same records have in common.
func (i *Info) withoutSize() Info {
	out := *i
	out.Bytes, out.SHA256 = 0, [32]byte{}
	return out
}

// others reads a file that covers others, to its end, and returns those that do not have the same records as it: they begin or end
// with another record, or have another number of records.
func (p *place) others(ctx context.Context, c *cover, known map[string]*Info) (rest []file, err error) {
	type mark struct {
		link  Link
		count uint64 // of records up to it
	}
	marks := map[keys.Epoch]mark{}
	for i := range c.inside {
		marks[c.inside[i].first-1], marks[c.inside[i].last] = mark{}, mark{}
	}
	r, err := p.open(ctx, c.name)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	marks[c.first-1] = mark{link: r.header.Link}
	for {
		rec, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if _, wanted := marks[rec.Epoch]; wanted {
			marks[rec.Epoch] = mark{r.last, r.count}
		}
	}
	for _, f := range c.inside {
		i, begin, end := known[f.name], marks[f.first-1], marks[f.last]
		if i == nil || i.Last != end.link || i.Link != begin.link || i.Count != end.count-begin.count || i.Begin != Linked && (f.first != c.first || i.Begin != r.header.Begin) {
			rest = append(rest, f)
		}
	}
	return rest, nil
}

// base is the name of a file without the directory.
func (f *file) base() string { return path.Base(f.name) }
