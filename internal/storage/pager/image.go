package pager

import (
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// A copy of a state consists of its pages and an image, which is its superblock as one page. The pages of superblocks and their
// copies are not copied: checkpoints write them while a state is copied, and a restored file gets new ones.

// Superblock returns the image of the state.
func (s *Snapshot) Superblock() []byte {
	image := make([]byte, s.pageSize)
	sb := s.current()
	sb.encode(image, sb.slot())
	return image
}

// Copied reports whether a copy of the state has page id: a live page that is not of a superblock. ReadMap has been called.
func (s *Snapshot) Copied(id page.ID) bool {
	return !s.OfSuperblock(id) && s.live.Has(int(id))
}

// NextCopied is the first page at or after id that a copy has, or the page count.
func (s *Snapshot) NextCopied(id page.ID) page.ID {
	for id < s.PageCount() && !s.Copied(id) {
		if id = page.ID(s.live.Next(int(id))); id < s.PageCount() && !s.Copied(id) {
			id++
		}
	}
	return min(id, s.PageCount())
}

// ReadRun reads neighbouring pages into buf in one piece, and checks each. It calls damaged for those that are not intact, and
// ends with its error. If the device cannot read the run in one piece, the pages are read one by one.
func (r *Reader) ReadRun(first page.ID, buf []byte, damaged func(id page.ID, damage error) error) error {
	n := len(buf) / r.pageSize
	whole := r.readRun(first, buf)
	for i := range n {
		id, p := first+page.ID(i), buf[i*r.pageSize:(i+1)*r.pageSize]
		err := whole
		if err == nil {
			err = r.check(id, p)
		} else {
			err = r.ReadPage(id, p)
		}
		if errors.Is(err, ErrCorrupt) {
			err = damaged(id, err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *Reader) readRun(first page.ID, buf []byte) error {
	if first < superblocks || first > maxPage {
		return r.corrupt(first, "no page has this id")
	}
	r.reads.Add(uint64(len(buf) / r.pageSize))
	_, err := r.file.ReadAt(buf, r.offset(first))
	return err
}

// Image is a state without its pages.
type Image struct{ sb superblock }

// DecodeImage checks and decodes what Superblock has returned.
func DecodeImage(image []byte) (*Image, error) {
	if len(image) < page.SizeMin || !page.ValidSize(len(image)) {
		return nil, fmt.Errorf("%w: an image of %d bytes", errTornSuperblock, len(image))
	}
	sb, err := decodeSuperblock(image, page.ID(page.ReadHeader(image).Checkpoint%superblocks))
	if err != nil {
		return nil, err
	}
	return &Image{sb}, nil
}

// State is the state's part that belongs to the engine.
func (i *Image) State() State { return i.sb.state }

// Checkpoint is the number of the state.
func (i *Image) Checkpoint() uint64 { return i.sb.checkpoint }

// PageSize is the size of the state's pages.
func (i *Image) PageSize() int { return i.sb.pageSize }

// PageCount is the number of pages of a file with the state.
func (i *Image) PageCount() page.ID { return i.sb.pageCount }

// StoreID is the identity of the data file from which the state is.
func (i *Image) StoreID() [16]byte { return i.sb.storeID }

// Restore writes the superblocks of a file that has the pages of the state: the state's own, and after it one with the next
// number and this state of the engine, as a checkpoint that changed no page would have left them. It syncs nothing.
func (i *Image) Restore(f vfs.File, state State) error {
	older, newer := i.sb, i.sb
	newer.checkpoint, newer.state = older.checkpoint+1, state
	newer.copy, newer.nextCopy = older.nextCopy, older.copy
	for _, sb := range []*superblock{&older, &newer} {
		for _, at := range sb.locations() {
			buf := vfs.AlignedBuffer(sb.pageSize)
			sb.encode(buf, at)
			if _, err := f.WriteAt(buf, int64(at)*int64(sb.pageSize)); err != nil {
				return fmt.Errorf("superblock %d: %w", at, err)
			}
		}
	}
	return nil
}
