package page

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
)

// Verify decides whether p is an intact tree page, whatever its bytes are: after it, Leaf and Inner can
// read p without leaving it. It repeats nothing of Check. It costs 2.4 us for 8 KiB, little compared with
// the read of the page.
func Verify(p []byte) error {
	if !ValidSize(len(p)) {
		return malformed("%d bytes is no page size", len(p))
	}
	if v, f := p[offVersion], binary.LittleEndian.Uint16(p[offFlags:]); v != version || f != 0 {
		return fmt.Errorf("%w: version %d, flags %#04x", ErrUnknown, v, f)
	}
	for _, b := range p[offTree:treeHeaderSize] {
		if b != 0 {
			return malformed("reserved header bytes are not zero")
		}
	}
	switch t := Type(p[offType]); t {
	case TypeLeaf:
		return verifyLeaf(p)
	case TypeInner:
		return verifyInner(p)
	default:
		return fmt.Errorf("%w: type %d where a tree page belongs", ErrUnknown, t)
	}
}

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrMalformed}, args...)...)
}

func verifyLeaf(p Leaf) error {
	n, pl := p.Count(), p.prefixLen()
	if n == 0 {
		return malformed("empty leaf")
	}
	if l := p[offLevel]; l != 0 {
		return malformed("leaf at level %d", l)
	}
	heads := offsetsAt(n, pl) + 2*(n+1)
	start := heads + 4*n
	if start > payloadEnd(len(p)) {
		return malformed("%d entries do not fit", n)
	}
	v := p.Layout()
	if err := verifyOffsets(p, v.offsets, start, entryHeader); err != nil {
		return err
	}
	return v.verifyEntries(p[treeHeaderSize:treeHeaderSize+n], p[heads:start], ReadHeader(p).Newest)
}

// verifyEntries checks the entries, whose bounds are known to be valid, and the tables about them.
func (v *LeafLayout) verifyEntries(fingerprints, heads []byte, newest keys.Epoch) error {
	pl := len(v.prefix)
	key := append(make([]byte, 0, 64), v.prefix...) // of the entry before
	var last keys.Trailer
	var fingerprint byte
	var h uint32
	for i := range v.count {
		if err := v.verifySuffix(i); err != nil {
			return err
		}
		suffix, t, value, large := v.At(i)
		if t.Kind() != keys.KindSet || large {
			if err := verifyValue(i, t, value, large); err != nil {
				return err
			}
		}
		if e := t.Epoch(); e > newest {
			return malformed("entry %d has epoch %d, newer than the page's newest %d", i, e, newest)
		}
		if i > 0 && len(suffix) == 0 {
			if last <= t {
				return malformed("versions %d and %d of one key do not descend", i-1, i)
			}
		} else {
			next := head(suffix)
			if i > 0 && next <= h && bytes.Compare(key[pl:], suffix) >= 0 {
				return malformed("keys %d and %d do not ascend", i-1, i)
			}
			key, h = append(key[:pl], suffix...), next
			fingerprint = Fingerprint(key)
		}
		last = t
		if got := fingerprints[i]; got != fingerprint {
			return malformed("fingerprint of entry %d is %#02x, its key's is %#02x", i, got, fingerprint)
		}
		if got := binary.LittleEndian.Uint32(heads[4*i:]); got != h {
			return malformed("head of entry %d is %#08x, its key's is %#08x", i, got, h)
		}
	}
	return nil
}

// verifyOffsets checks that offsets start directly after the tables, ascend by at least least, and end
// inside the page.
func verifyOffsets(p, offsets []byte, start, least int) error {
	at := int(binary.LittleEndian.Uint16(offsets))
	if at != start {
		return malformed("first offset is %d, the tables end at %d", at, start)
	}
	for i := 2; i < len(offsets); i += 2 {
		next := int(binary.LittleEndian.Uint16(offsets[i:]))
		if next < at+least || next > payloadEnd(len(p)) {
			return malformed("offset %d is %d, after %d in a page of %d bytes", i/2, next, at, len(p))
		}
		at = next
	}
	return nil
}

// verifySuffix checks the length of the suffix of entry i, whose bounds are known to be valid.
func (v *LeafLayout) verifySuffix(i int) error {
	at, end := v.start(i), v.start(i+1)
	s := binary.LittleEndian.Uint16(v.page[at+8:])
	if s&suffixLenHigh != 0 && len(v.page) < SizeMax {
		return fmt.Errorf("%w: entry %d has a reserved flag", ErrUnknown, i)
	}
	if entryHeader+suffixLen(s) > end-at {
		return malformed("suffix of entry %d ends after the entry", i)
	}
	if len(v.prefix)+suffixLen(s) > KeySizeMax(len(v.page)) {
		return malformed("key of entry %d is too long", i)
	}
	return nil
}

// verifyValue checks the value of entry i.
func verifyValue(i int, t keys.Trailer, value []byte, large bool) error {
	if _, err := metadata.Read(t.Kind(), value); errors.Is(err, metadata.ErrUnknown) {
		return fmt.Errorf("%w: entry %d: %w", ErrUnknown, i, err)
	} else if err != nil {
		return malformed("entry %d: %v", i, err)
	}
	if large && (!t.Kind().HasValue() || len(metadata.Value(t.Kind(), value)) != RefSize) {
		return malformed("entry %d has a reference of %d bytes", i, len(value))
	}
	switch t.Kind() {
	case keys.KindSet, keys.KindSetMetadata:
	case keys.KindDelete:
		if len(value) != 0 {
			return malformed("tombstone %d has a value", i)
		}
	default:
		return fmt.Errorf("%w: entry %d is of kind %d", ErrUnknown, i, t.Kind())
	}
	return nil
}

func verifyInner(p Inner) error {
	n, pl := p.Count(), p.prefixLen()
	if n == 0 {
		return malformed("inner node without children")
	}
	if l := p.Level(); l == 0 || l > LevelMax {
		return malformed("inner node at level %d", l)
	}
	l := layoutInner(n, pl)
	if l.separators > payloadEnd(len(p)) {
		return malformed("%d children do not fit", n)
	}
	offsets := p[l.offsets : l.offsets+2*n]
	if err := verifyOffsets(p, offsets, l.separators, 1); err != nil {
		return err
	}
	for i := range n {
		if p.Child(i) < 2 {
			return malformed("child %d is page %d", i, p.Child(i))
		}
		if e, newest := p.Newest(i), ReadHeader(p).Newest; e > newest {
			return malformed("child %d has epoch %d, newer than the page's newest %d", i, e, newest)
		}
	}
	return p.verifySeparators(l, offsets)
}

func (p Inner) verifySeparators(l innerLayout, offsets []byte) error {
	pl := p.prefixLen()
	var last Separator
	for i := 1; i < p.Count(); i++ {
		at, end := binary.LittleEndian.Uint16(offsets[2*i-2:]), binary.LittleEndian.Uint16(offsets[2*i:])
		if t := int(p[at]); t != 0 && t != trailerSize || 1+t > int(end-at) {
			return malformed("separator %d has a trailer of %d bytes", i, t)
		}
		suffix, t := p.separator(offsets, i)
		if pl+len(suffix) > KeySizeMax(len(p)) {
			return malformed("separator %d is too long", i)
		}
		if got, want := binary.LittleEndian.Uint32(p[l.heads+4*(i-1):]), head(suffix); got != want {
			return malformed("head of separator %d is %#08x, its key's is %#08x", i, got, want)
		}
		if i > 1 && last.Compare(suffix, t) >= 0 {
			return malformed("separators %d and %d do not ascend", i-1, i)
		}
		last = Separator{Key: suffix, Trailer: t}
	}
	return nil
}
