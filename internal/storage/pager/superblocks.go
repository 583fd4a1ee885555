package pager

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Each superblock is in the file twice: in its slot, one of the first two pages, and in a copy farther
// down. Slot and copy are written together and synced once, so that a crash leaves both, one or none of
// them, and each is a whole state. Damage to one of them costs nothing: Open takes the other one and
// writes the damaged one again.
//
// It must be certain which superblock is the newest. The successor of superblock k would be in the other
// slot, and in the page that k names for its successor's copy. If one of these two pages holds an intact
// older page, no successor is durable. If neither does, a successor may have been durable and may be
// damaged twice. Then the rest of the file decides: a page of checkpoint k+2 or later proves that k+1 was
// durable, and that pages of k have been freed. Without such a page everything that k reaches is intact,
// and the log tells whether it still reaches back to k. None of that is decided while the device fails to
// read one of these pages: it may hold the successor, with a bulk load that the log does not have.
type superblockSurvey struct {
	file     vfs.File
	size     int64
	pageSize int

	newest  superblock
	older   *superblock       // its predecessor in the other slot, if it is readable anywhere
	faults  []superblockFault // pages that do not hold what belongs there
	certain bool              // newest is the newest that was ever durable

	unreadable error // why the device failed to read a page that would tell; nil if it is certain, or damaged for good
}

// superblockFault is a damaged superblock or copy.
type superblockFault struct {
	at  page.ID
	err error
}

// copyDistance is the distance of copies from the beginning of the file, in bytes. Damage to neighbouring
// sectors, or to a block of a flash device, leaves one of the two intact. In files of small pages, which
// only tests have, copyPagesMax bounds the distance.
const (
	copyDistance = 64 << 10
	copyPagesMax = 32
)

// copyHome is the first page that may hold a copy.
func copyHome(pageSize int) page.ID {
	return page.ID(min(max(copyDistance/pageSize, superblocks), copyPagesMax))
}

// surveySuperblocks finds the newest superblock of f. It writes nothing.
func surveySuperblocks(f vfs.File) (*superblockSurvey, error) {
	size, err := f.Size()
	if err != nil {
		return nil, err
	}
	s := &superblockSurvey{file: f, size: size}
	slots, errs := s.readSlots()
	if err := s.refuse(errs[:]...); err != nil {
		return nil, err
	}
	if errs[0] == nil && errs[1] == nil && slots[0].storeID != slots[1].storeID {
		return nil, fmt.Errorf("%s: %w: they belong to different stores", f.Name(), ErrSuperblocks)
	}
	var found []*superblock
	for i := range slots {
		if errs[i] == nil {
			found = append(found, &slots[i])
			s.pageSize = slots[i].pageSize
		}
	}
	if len(found) == 0 {
		if found, err = s.searchWithoutSlots(errs); err != nil {
			return nil, err
		}
	}
	if err := s.choose(found); err != nil {
		return nil, err
	}
	if s.certain, err = s.isCertain(errs); err != nil {
		return nil, err
	}
	if !s.certain {
		if err := s.searchWholeFile(errs); err != nil {
			return nil, err
		}
	}
	return s, s.findFaults(errs)
}

// readSlots reads the first two pages.
func (s *superblockSurvey) readSlots() (slots [superblocks]superblock, errs [superblocks]error) {
	slots[0], errs[0] = readFirst(s.file, s.size)
	if errs[0] == nil {
		slots[1], errs[1] = readSuperblock(s.file, s.size, 1, slots[0].pageSize)
	} else {
		slots[1], errs[1] = searchSecond(s.file, s.size)
	}
	return slots, errs
}

// refuse returns the first error that is no damage. A newer program has written here last, or will have
// converted everything: an older superblock must not be used then. An error of the file system proves
// nothing about what was written.
func (s *superblockSurvey) refuse(errs ...error) error {
	for _, err := range errs {
		if errors.Is(err, ErrNewerFormat) {
			return fmt.Errorf("%s: superblock: %w", s.file.Name(), err)
		}
	}
	for _, err := range errs {
		if err != nil && !isSuperblockDamage(err) {
			return fmt.Errorf("%s: superblock: %w", s.file.Name(), err)
		}
	}
	return nil
}

func isSuperblockDamage(err error) bool {
	return errors.Is(err, errTornSuperblock) || errors.Is(err, ErrNotDataFile) || errors.Is(err, vfs.ErrDevice)
}

// choose takes the newest of the superblocks found and of the copies that they name, and its predecessor.
func (s *superblockSurvey) choose(found []*superblock) error {
	for i := 0; i < len(found); i++ { // found grows in the loop
		for _, at := range []page.ID{found[i].copy, found[i].nextCopy} {
			if at == 0 {
				continue
			}
			c, err := readSuperblock(s.file, s.size, at, s.pageSize)
			if err := s.refuse(err); err != nil {
				return err
			}
			if err != nil || c.storeID != found[i].storeID || isKnown(found, &c) {
				continue
			}
			found = append(found, &c)
		}
	}
	s.newest = *found[0]
	for _, c := range found {
		if c.checkpoint > s.newest.checkpoint {
			s.newest = *c
		}
	}
	s.older = nil
	for _, c := range found {
		if c.checkpoint+1 == s.newest.checkpoint {
			s.older = c
		}
	}
	return nil
}

func isKnown(found []*superblock, c *superblock) bool {
	for _, k := range found {
		if k.checkpoint == c.checkpoint {
			return true
		}
	}
	return false
}

// isCertain reports whether one of the two pages for the successor of the newest superblock holds an
// intact page. That page is then older.
func (s *superblockSurvey) isCertain(errs [superblocks]error) (bool, error) {
	if errs[s.newest.otherSlot()] == nil {
		return true, nil
	}
	if s.newest.nextCopy == 0 {
		return false, nil
	}
	buf := vfs.AlignedBuffer(s.pageSize)
	err := s.readPage(s.newest.nextCopy, buf)
	if err != nil && !errors.Is(err, errTornSuperblock) {
		return false, s.refuse(err)
	}
	return err == nil, nil
}

// readPage reads an intact page of any type.
func (s *superblockSurvey) readPage(id page.ID, buf []byte) error {
	if s.size < int64(id+1)*int64(s.pageSize) {
		return fmt.Errorf("%w: past the end of the file", errTornSuperblock)
	}
	if _, err := s.file.ReadAt(buf, int64(id)*int64(s.pageSize)); err != nil {
		if errors.Is(err, vfs.ErrDevice) {
			return fmt.Errorf("%w: %w", errTornSuperblock, err)
		}
		return err
	}
	if err := page.Check(buf, id); err != nil {
		return fmt.Errorf("%w: %w", errTornSuperblock, err)
	}
	return nil
}

// searchWholeFile decides whether the newest superblock can be used although it is not certain that it is
// the newest. It also finds copies that no superblock names yet.
func (s *superblockSurvey) searchWholeFile(errs [superblocks]error) error {
	found, newestPage, unreadable, err := s.eachCopy()
	if err != nil {
		return err
	}
	own := s.newest
	mine := []*superblock{&own}
	for _, c := range found {
		if c.storeID == own.storeID {
			mine = append(mine, c)
		}
	}
	if err := s.choose(mine); err != nil {
		return err
	}
	if s.certain, err = s.isCertain(errs); err != nil {
		return err
	}
	if slotErr := errs[s.newest.otherSlot()]; !s.certain && (unreadable != nil || errors.Is(slotErr, vfs.ErrDevice)) {
		s.unreadable = fmt.Errorf("%s: %w: %w", s.file.Name(), ErrSuperblockUnreadable, cmp.Or(unreadable, slotErr))
	}
	if newestPage > s.newest.checkpoint+1 {
		missing := fmt.Errorf("%s: %w: the newest superblock that can be read is that of checkpoint %d, and the file holds pages of checkpoint %d",
			s.file.Name(), ErrSuperblockMissing, s.newest.checkpoint, newestPage)
		return errors.Join(s.unreadable, missing)
	}
	return nil
}

// eachCopy reads the whole file after the slots. It returns the superblocks in it, the newest checkpoint that wrote any page, and
// why the device failed to read a page.
func (s *superblockSurvey) eachCopy() (found []*superblock, newestPage uint64, unreadable, err error) {
	buf := vfs.AlignedBuffer(s.pageSize)
	for id := page.ID(superblocks); int64(id+1)*int64(s.pageSize) <= s.size; id++ {
		err := s.readPage(id, buf)
		if errors.Is(err, vfs.ErrDevice) {
			unreadable = cmp.Or(unreadable, fmt.Errorf("page %d: %w", id, err))
		}
		if errors.Is(err, errTornSuperblock) {
			continue
		}
		if err != nil {
			return nil, 0, nil, err
		}
		h := page.ReadHeader(buf)
		newestPage = max(newestPage, h.Checkpoint)
		if h.Type != page.TypeSuperblock {
			continue
		}
		if c, err := decodeSuperblock(buf, id); err == nil {
			found = append(found, &c)
		}
	}
	return found, newestPage, unreadable, nil
}

// searchWithoutSlots searches for copies when both slots are damaged.
func (s *superblockSurvey) searchWithoutSlots(errs [superblocks]error) (found []*superblock, err error) {
	if s.pageSize, err = pageSizeOf(s.file, s.size); err != nil {
		return nil, err
	}
	if s.pageSize != 0 {
		if found, _, _, err = s.eachCopy(); err != nil {
			return nil, err
		}
	}
	if len(found) > 0 {
		newest := found[0]
		for _, c := range found {
			if c.checkpoint > newest.checkpoint {
				newest = c
			}
		}
		return []*superblock{newest}, nil
	}
	if errors.Is(errs[0], ErrNotDataFile) && errors.Is(errs[1], ErrNotDataFile) {
		return nil, fmt.Errorf("%s: %w", s.file.Name(), ErrNotDataFile)
	}
	return nil, fmt.Errorf("%s: %w: 0: %w; 1: %w", s.file.Name(), ErrSuperblocks, errs[0], errs[1])
}

// pageSizeOf is the page size of a file without readable slots: the largest one with which one of the first thousand
// pages after the slots is intact. It is zero if there is none.
//
// Clients can write values that look like smaller pages, in the place where these would be, superblocks among them. None
// can look like a larger page: where one would begin a page of the file begins, too, whose own header is there with another id.
func pageSizeOf(f vfs.File, size int64) (int, error) {
	for pageSize := page.SizeMax; pageSize >= page.SizeMin; pageSize /= 2 {
		s := superblockSurvey{file: f, size: size, pageSize: pageSize}
		buf := vfs.AlignedBuffer(pageSize)
		for id := page.ID(superblocks); id < 1000 && int64(id+1)*int64(pageSize) <= size; id++ {
			err := s.readPage(id, buf)
			if err == nil {
				return pageSize, nil
			}
			if !errors.Is(err, errTornSuperblock) {
				return 0, err
			}
		}
	}
	return 0, nil
}

// findFaults compares the pages of the newest superblock and of its predecessor with what they should
// hold. An older superblock that a crash left in the page of the newest is no damage.
func (s *superblockSurvey) findFaults(slotErrs [superblocks]error) error {
	fault := func(at page.ID, err error) {
		if err != nil {
			s.faults = append(s.faults, superblockFault{at, err})
		}
	}
	for i, err := range slotErrs {
		fault(page.ID(i), err)
	}
	for _, at := range []page.ID{s.newest.copy, s.newest.nextCopy} {
		if at == 0 || s.isFresh(at) {
			continue
		}
		_, err := readSuperblock(s.file, s.size, at, s.pageSize)
		if err := s.refuse(err); err != nil {
			return err
		}
		fault(at, err)
	}
	return nil
}

// isFresh reports whether the newest superblock is the first that names page at: the crash may have come
// before anything was written there.
func (s *superblockSurvey) isFresh(at page.ID) bool {
	return s.older != nil && at != s.older.copy && at != s.older.nextCopy
}

// repair writes superblocks that are damaged, or that a crash left older than the newest, from their copies.
// It does nothing unless it is certain which superblock is the newest.
func (s *superblockSurvey) repair() error {
	if !s.certain {
		return nil
	}
	belongs := map[page.ID]*superblock{s.newest.otherSlot(): s.older} // nil if that is damaged twice
	if at := s.newest.nextCopy; at != 0 {
		belongs[at] = &s.newest
		if s.older != nil && s.older.copy == at {
			belongs[at] = s.older
		}
	}
	for _, at := range s.newest.locations() {
		belongs[at] = &s.newest
	}
	wrote := false
	for at, sb := range belongs {
		was, err := readSuperblock(s.file, s.size, at, s.pageSize)
		if err := s.refuse(err); err != nil {
			return err
		}
		if sb == nil || err == nil && (sb == s.older || was.checkpoint == sb.checkpoint) {
			continue
		}
		buf := vfs.AlignedBuffer(s.pageSize)
		sb.encode(buf, at)
		if _, err := s.file.WriteAt(buf, int64(at)*int64(s.pageSize)); err != nil {
			return fmt.Errorf("rewrite superblock %d: %w", at, err)
		}
		wrote = true
	}
	if !wrote {
		return nil
	}
	return s.file.SyncData()
}

// damage describes the faults; nil if there are none.
func (s *superblockSurvey) damage() error {
	var all []error
	for _, f := range s.faults {
		what := "superblock"
		if f.at >= superblocks {
			what = "copy of a superblock, page"
		}
		all = append(all, fmt.Errorf("%s %d: %w", what, f.at, f.err))
	}
	return errors.Join(all...)
}

// readFirst reads superblock 0, whose offset does not depend on the page size.
func readFirst(f vfs.File, size int64) (superblock, error) {
	head := vfs.AlignedBuffer(max(page.SizeMin, vfs.DirectAlignment))
	if size < page.SizeMin {
		return superblock{}, ErrNotDataFile
	}
	if err := readUpTo(f, head, size, 0); err != nil {
		return superblock{}, err
	}
	if string(head[sbMagic:sbMagic+len(magic)]) != magic {
		return superblock{}, ErrNotDataFile
	}
	pageSize := int(binary.LittleEndian.Uint32(head[sbPageSize:]))
	if !page.ValidSize(pageSize) {
		return superblock{}, fmt.Errorf("%w: page size %d", errTornSuperblock, pageSize)
	}
	return readSuperblock(f, size, 0, pageSize)
}

// searchSecond searches for superblock 1 at its offset for each page size.
func searchSecond(f vfs.File, size int64) (superblock, error) {
	err := ErrNotDataFile
	for pageSize := page.SizeMin; pageSize <= page.SizeMax; pageSize *= 2 {
		s, e := readSuperblock(f, size, 1, pageSize)
		if e == nil {
			return s, nil
		}
		if !errors.Is(e, ErrNotDataFile) && !errors.Is(err, ErrNewerFormat) {
			err = e
		}
	}
	return superblock{}, err
}

func readSuperblock(f vfs.File, size int64, id page.ID, pageSize int) (superblock, error) {
	if size < int64(id+1)*int64(pageSize) {
		return superblock{}, ErrNotDataFile
	}
	buf := vfs.AlignedBuffer(pageSize)
	if _, err := f.ReadAt(buf, int64(id)*int64(pageSize)); err != nil {
		return superblock{}, err
	}
	return decodeSuperblock(buf, id)
}

// readUpTo fills as much of buf as the file has.
func readUpTo(f vfs.File, buf []byte, size, off int64) error {
	_, err := f.ReadAt(buf[:min(int64(len(buf)), size-off)], off)
	return err
}
