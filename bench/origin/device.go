package origin

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/internal/vfs"
)

// device reads random pages of a file that the page cache does not hold.
type device struct {
	way    vfs.IO
	serial bool
}

const (
	devicePage  = 8192
	devicePages = 128 << 20 / devicePage // the scenario's load
)

func (o device) run(r *harness.Run) (err error) {
	files, err := vfs.OpenOS(o.way)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, files.Close()) }()
	name := filepath.Join(r.Dir, "pages")
	if err := writePages(files, name, r.Load); err != nil {
		return err
	}
	file, err := files.Direct().Open(name, vfs.ReadOnly)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	requests := make([]vfs.Request, r.Point)
	for i := range requests {
		requests[i].Buf = vfs.AlignedBuffer(devicePage)
	}
	random := rand.New(rand.NewPCG(r.Seed, 1))
	batches, right := max(r.Size/r.Point, 1), 0
	err = r.Time(batches*r.Point, func() error {
		for range batches {
			for i := range requests {
				requests[i].Offset = random.Int64N(int64(r.Load)) * devicePage
			}
			if err := o.read(file, requests); err != nil {
				return err
			}
			for i := range requests {
				if binary.LittleEndian.Uint64(requests[i].Buf) == uint64(requests[i].Offset/devicePage) {
					right++
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := o.prove(r, files.Stats(), float64(batches*r.Point)); err != nil {
		return err
	}
	return r.Verified(right, batches*r.Point)
}

func (o device) read(file vfs.File, requests []vfs.Request) error {
	if !o.serial {
		return file.ReadBatch(requests)
	}
	for i := range requests {
		if _, err := file.ReadAt(requests[i].Buf, requests[i].Offset); err != nil {
			return err
		}
	}
	return nil
}

// prove shows which way the reads went.
func (o device) prove(r *harness.Run, s vfs.Stats, pages float64) error {
	least := func(on bool) float64 {
		if on {
			return pages
		}
		return 0
	}
	most := func(on bool) float64 {
		if on {
			return math.Inf(1)
		}
		return 0
	}
	ring, pool := !o.serial && o.way == vfs.IOUring, !o.serial && o.way == vfs.IOPread
	return errors.Join(
		r.Prove("ring reads", float64(s.RingReads), least(ring), most(ring)),
		r.Prove("pool reads", float64(s.PoolReads), least(pool), most(pool)),
		r.Prove("single reads", float64(s.SingleReads), least(o.serial), most(o.serial)),
	)
}

// writePages makes the file; each page begins with its number.
func writePages(files *vfs.OS, name string, pages int) error {
	file, err := files.Open(name, vfs.Create)
	if err != nil {
		return err
	}
	const together = 128
	buffer := make([]byte, together*devicePage)
	for first := 0; first < pages && err == nil; first += together {
		for i := range together {
			binary.LittleEndian.PutUint64(buffer[i*devicePage:], uint64(first+i))
		}
		_, err = file.WriteAt(buffer, int64(first)*devicePage)
	}
	if err != nil {
		err = fmt.Errorf("write %s: %w", name, err)
	}
	return errors.Join(err, file.Sync(), file.Close())
}
