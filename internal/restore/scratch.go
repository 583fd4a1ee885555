package restore

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// The directory of a drill has a whole copy of the store. A drill that is killed cannot remove it, so the next one does. A *marker*, a
// file in the directory, says that a drill has made it; the drill has a lock on the marker until it ends, and the system takes the lock
// away when the process is killed. A directory without a marker is not one of ours, whatever its name is.

const (
	// scratchPrefix begins the name of the directory of a drill.
	scratchPrefix = "epochkv-drill-"
	markerName    = "DRILL"
	markerText    = "A restore drill of EpochKV has made this directory. It is removed with everything in it at the end of the drill, or by the next drill.\n"
)

// scratch is the directory of a drill that is running.
type scratch struct {
	dir    string
	marker *os.File // locked
}

// newScratch makes a directory below another one, which must exist.
func newScratch(parent string) (*scratch, error) {
	dir, err := os.MkdirTemp(parent, scratchPrefix+"*")
	if err != nil {
		return nil, err
	}
	marker, err := os.OpenFile(filepath.Join(dir, markerName), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, errors.Join(err, os.Remove(dir))
	}
	s := &scratch{dir, marker}
	err = lockMarker(marker) // before the text: without it, the marker is not one
	if err == nil {
		_, err = marker.WriteString(markerText)
	}
	if err != nil {
		return nil, errors.Join(err, s.remove())
	}
	return s, nil
}

// remove removes the directory, the marker last: what is left by a process that is killed here is removed by the next drill.
func (s *scratch) remove() error {
	entries, err := os.ReadDir(s.dir)
	for _, e := range entries {
		if e.Name() != markerName {
			err = errors.Join(err, os.RemoveAll(filepath.Join(s.dir, e.Name())))
		}
	}
	if err == nil {
		err = os.RemoveAll(s.dir)
	}
	return errors.Join(err, s.marker.Close())
}

// RemoveLeftovers removes the directories below another one that drills have left when they were killed, and returns their names. A
// directory that no drill has made stays, and so does that of a drill that runs.
func RemoveLeftovers(parent string) (removed []string, err error) {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), scratchPrefix) { // a symbolic link is no directory
			continue
		}
		dir := filepath.Join(parent, e.Name())
		left, failed := leftover(dir)
		if left != nil {
			if failed = left.remove(); failed == nil {
				removed = append(removed, dir)
			}
		}
		if failed != nil {
			err = errors.Join(err, fmt.Errorf("restore: remove what a drill has left: %w", failed))
		}
	}
	return removed, err
}

// leftover locks a directory that a drill has left; nil if it is not one, or if the drill runs.
func leftover(dir string) (*scratch, error) {
	marker, err := os.OpenFile(filepath.Join(dir, markerName), os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ELOOP) || errors.Is(err, fs.ErrPermission) {
			return nil, nil
		}
		return nil, err
	}
	s := &scratch{dir, marker}
	text := make([]byte, len(markerText)+1)
	n, err := io.ReadFull(marker, text)
	if !errors.Is(err, io.ErrUnexpectedEOF) || string(text[:n]) != markerText || lockMarker(marker) != nil {
		return nil, marker.Close()
	}
	return s, nil
}

// lockMarker locks a marker, or returns an error if another drill has it.
func lockMarker(marker *os.File) error {
	for {
		err := syscall.Flock(int(marker.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}
