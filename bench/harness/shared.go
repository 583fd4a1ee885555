package harness

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// shared are the things that runs use together: a store that takes long to fill, say. They live for one stage.
type shared struct {
	stage string
	items map[string]sharedItem
	order []string
	made  time.Duration // what making them took during this scenario
}

type sharedItem struct {
	value io.Closer
	dir   string
}

// Shared returns what key stands for, and has build make it in an empty directory when it is asked for the first time. It lasts
// while scenarios of the same stage follow each other, or for one scenario that names none. A run that changes shared data must
// leave it as good for the next run as it was, and must check it all the same.
func Shared[T io.Closer](r *Run, key string, build func(dir string) (T, error)) (T, error) {
	if item, ok := r.shared.items[key]; ok {
		r.sharedDir = item.dir
		return item.value.(T), nil
	}
	began := time.Now()
	defer func() { r.shared.made += time.Since(began) }()
	var none T
	dir, err := os.MkdirTemp(r.scratch, "shared-")
	if err != nil {
		return none, err
	}
	value, err := build(dir)
	if err != nil {
		return none, errors.Join(fmt.Errorf("make %s: %w", key, err), os.RemoveAll(dir))
	}
	r.shared.add(key, sharedItem{value: value, dir: dir})
	r.log("        made %s in %v", key, time.Since(began).Round(time.Millisecond))
	r.sharedDir = dir
	return value, nil
}

func (s *shared) add(key string, item sharedItem) {
	if s.items == nil {
		s.items = map[string]sharedItem{}
	}
	s.items[key] = item
	s.order = append(s.order, key)
}

// enter ends what was shared by other stages. The unnamed stage is never the same as the one before.
func (s *shared) enter(stage string) error {
	if stage != "" && stage == s.stage {
		return nil
	}
	s.stage = stage
	return s.close()
}

// close ends everything, what was made last first.
func (s *shared) close() (err error) {
	for i := len(s.order) - 1; i >= 0; i-- {
		item := s.items[s.order[i]]
		err = errors.Join(err, item.value.Close(), os.RemoveAll(item.dir))
	}
	s.items, s.order = nil, nil
	return err
}

// SharedDir is the directory of what the run shares with others: the last that it asked for.
func (r *Run) SharedDir() string { return r.sharedDir }
