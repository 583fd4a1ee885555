package vfs

// faultyFile is a file of a Faulty file system.
type faultyFile struct {
	File
	fs *Faulty
}

var _ File = (*faultyFile)(nil)

func (f *faultyFile) do(op Op, call func() error) error { return f.fs.do(op, f.Name(), call) }

// Close closes the file, also if it fails by a rule, as on Linux.
func (f *faultyFile) Close() error {
	var inner error
	failed := f.do(OpClose, func() error {
		inner = f.File.Close()
		return inner
	})
	if failed != nil && inner == nil {
		_ = f.File.Close() // only the injected error counts
	}
	return failed
}

// ReadAt reads.
func (f *faultyFile) ReadAt(p []byte, off int64) (int, error) {
	return f.readAs(f.fs.matchAt(OpRead, f.Name(), off, len(p)), p, off)
}

func (f *faultyFile) readAs(rule *Rule, p []byte, off int64) (int, error) {
	if rule == nil {
		return f.File.ReadAt(p, off)
	}
	switch rule.Fault {
	case Fail:
		return 0, pathError(OpRead, f.Name(), rule.Err)
	case Short:
		return f.shortRead(rule, p[:min(rule.Bytes, len(p))], off)
	case Unreadable:
		return f.shortRead(rule, p[:max(rule.page()-off, 0)], off)
	}
	n, err := f.File.ReadAt(p, off)
	if rule.Fault == FlipBit && n > 0 {
		p[rule.Bytes%n] ^= 1
	}
	return n, err
}

func (f *faultyFile) shortRead(rule *Rule, p []byte, off int64) (int, error) {
	n, err := f.File.ReadAt(p, off)
	if err == nil {
		err = pathError(OpRead, f.Name(), rule.Err)
	}
	return n, err
}

// WriteAt writes.
func (f *faultyFile) WriteAt(p []byte, off int64) (int, error) {
	return f.writeAs(f.fs.match(OpWrite, f.Name()), p, off)
}

func (f *faultyFile) writeAs(rule *Rule, p []byte, off int64) (int, error) {
	if rule == nil {
		return f.File.WriteAt(p, off)
	}
	switch rule.Fault {
	case Fail:
		return 0, pathError(OpWrite, f.Name(), rule.Err)
	case LostSync:
		return len(p), nil
	case Short:
		n, err := f.File.WriteAt(p[:min(rule.Bytes, len(p))], off)
		if err == nil {
			err = pathError(OpWrite, f.Name(), rule.Err)
		}
		return n, err
	case Torn:
		return 0, f.tornWrite(rule, p, off)
	}
	return f.File.WriteAt(p, off)
}

// tornWrite writes the odd sectors of p: the first sector is missing and later sectors are there, which is the hardest
// case for a reader that trusts a header.
func (f *faultyFile) tornWrite(rule *Rule, p []byte, off int64) error {
	for at := 0; at < len(p); {
		span := min(len(p)-at, int(sectorSize-(off+int64(at))%sectorSize))
		if (off+int64(at))/sectorSize%2 == 1 {
			if _, err := f.File.WriteAt(p[at:at+span], off+int64(at)); err != nil {
				return err
			}
		}
		at += span
	}
	return pathError(OpWrite, f.Name(), rule.Err)
}

// Size is the file's length.
func (f *faultyFile) Size() (size int64, err error) {
	err = f.do(OpSize, func() (err error) {
		size, err = f.File.Size()
		return err
	})
	return size, err
}

// Truncate sets the length.
func (f *faultyFile) Truncate(size int64) error {
	return f.do(OpTruncate, func() error { return f.File.Truncate(size) })
}

// Preallocate takes space.
func (f *faultyFile) Preallocate(size int64) error {
	return f.do(OpPreallocate, func() error { return f.File.Preallocate(size) })
}

// Sync makes the file durable.
func (f *faultyFile) Sync() error { return f.sync(OpSync, f.File.Sync) }

// SyncData makes the contents durable.
func (f *faultyFile) SyncData() error { return f.sync(OpSyncData, f.File.SyncData) }

func (f *faultyFile) sync(op Op, call func() error) error {
	rule := f.fs.match(op, f.Name())
	if rule == nil {
		return call()
	}
	switch rule.Fault {
	case LostSync:
		return nil
	case DiscardDirty:
		if m, ok := f.File.(*memFile); ok {
			m.discardDirty()
		}
		return pathError(op, f.Name(), rule.Err)
	case Fail:
		return pathError(op, f.Name(), rule.Err)
	}
	return call()
}

// ReadBatch passes the requests for which no rule fires on as one batch, so that the inner file's batch path is tested
// and not replaced.
func (f *faultyFile) ReadBatch(reqs []Request) error {
	return f.batch(OpRead, reqs, f.readAs, f.File.ReadBatch)
}

// WriteBatch is the same for writes.
func (f *faultyFile) WriteBatch(reqs []Request) error {
	return f.batch(OpWrite, reqs, f.writeAs, f.File.WriteBatch)
}

func (f *faultyFile) batch(
	op Op, reqs []Request,
	single func(*Rule, []byte, int64) (int, error),
	inner func([]Request) error,
) error {
	var healthy []Request
	var indexes []int
	for i := range reqs {
		if rule := f.fs.matchAt(op, f.Name(), reqs[i].Offset, len(reqs[i].Buf)); rule != nil {
			_, reqs[i].Err = single(rule, reqs[i].Buf, reqs[i].Offset)
			continue
		}
		healthy, indexes = append(healthy, reqs[i]), append(indexes, i)
	}
	if len(healthy) > 0 {
		_ = inner(healthy) // each request's error is copied below
	}
	for i, index := range indexes {
		reqs[index].Err = healthy[i].Err
	}
	return firstError(reqs)
}
