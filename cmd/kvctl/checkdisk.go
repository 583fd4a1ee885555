package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

const (
	diskBytes = 256 << 20       // more than what small caches of a device hold
	diskFor   = 2 * time.Second // how long each check takes at most

	syncedBytes = 4096    // a small commit: one block
	randomBytes = 8192    // a page of the data file
	streamBytes = 1 << 20 // one request of a sequential read
)

// Milliseconds at the 99th percentile, and MB/s. A disk whose syncs take 10 ms gives a lone writer 100 durable writes a second.
var (
	syncBars   = bars{warn: 10, fail: 100}
	randomBars = bars{warn: 5, fail: 50}
	streamBars = bars{warn: 100, fail: 20, low: true}
)

// probe is the file that the disk is measured with.
type probe struct {
	file   vfs.File
	bytes  int64
	length time.Duration // of each check
	direct bool          // past the page cache
	buffer []byte
	random *rand.Rand
}

// checkDisk measures the disk below dir with a file of so many bytes, each check for so long.
func checkDisk(ctx context.Context, dir string, bytes int64, length time.Duration) (findings []finding, err error) {
	files := vfs.NewOS()
	name := filepath.Join(dir, fmt.Sprintf("kvctl-check-%016x", rand.Uint64()))
	if err := writeProbe(files, name, bytes); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, files.Remove(name)) }()
	p, err := openProbe(files, name)
	if err != nil {
		return nil, err
	}
	p.bytes, p.length = bytes, length
	defer func() { err = errors.Join(err, p.file.Close()) }()
	for _, check := range []func() (finding, error){p.syncs, p.stream, p.scattered} {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		f, err := check()
		if err != nil {
			return nil, err
		}
		findings = append(findings, f)
	}
	return findings, nil
}

// writeProbe makes the file and leaves no file if it fails. Its bytes are random: some devices keep no zeros.
func writeProbe(files *vfs.OS, name string, bytes int64) error {
	file, err := files.Open(name, vfs.Create)
	if err != nil {
		return err
	}
	random, chunk := rand.NewChaCha8([32]byte{}), make([]byte, streamBytes)
	for at := int64(0); at < bytes && err == nil; at += streamBytes {
		_, _ = random.Read(chunk) // never fails
		_, err = file.WriteAt(chunk, at)
	}
	if err := errors.Join(err, file.Sync(), file.Close()); err != nil {
		return errors.Join(err, files.Remove(name))
	}
	return nil
}

// openProbe opens the file past the page cache if the file system lets it; tmpfs and some network file systems do not.
func openProbe(files *vfs.OS, name string) (*probe, error) {
	p := &probe{direct: true, buffer: vfs.AlignedBuffer(streamBytes), random: rand.New(rand.NewPCG(1, 1))}
	var err error
	if p.file, err = files.Direct().Open(name, vfs.ReadWrite); err == nil {
		return p, nil
	}
	p.direct = false
	p.file, err = files.Open(name, vfs.ReadWrite)
	return p, err
}

// cached is what findings about reads add where the page cache could not be passed.
func (p *probe) cached() string {
	if p.direct {
		return ""
	}
	return " (the file system cannot read past the page cache, so this is memory and not the disk)"
}

// syncs overwrites one block after the other and has each reach the device, as a lone writer's commits do.
func (p *probe) syncs() (finding, error) {
	at := int64(0)
	h, err := timed(p.length, func() error {
		at = (at + syncedBytes) % p.bytes
		if _, err := p.file.WriteAt(p.buffer[:syncedBytes], at); err != nil {
			return err
		}
		return p.file.SyncData()
	})
	if err != nil {
		return finding{}, err
	}
	return judgeLatency("fdatasync", h, syncBars, advice{
		pass: "durable writes will be fast",
		warn: "a lone writer waits this long for each durable write; many writers share syncs. Is anything else writing to this disk?",
		fail: "durable writes will stall: this is a slow or busy disk, or one without a write cache that survives power loss",
	}), nil
}

// stream reads the file from its start on in large pieces.
func (p *probe) stream() (finding, error) {
	at, began := int64(0), time.Now()
	for ; at < p.bytes && time.Since(began) < p.length; at += streamBytes {
		if _, err := p.file.ReadAt(p.buffer[:streamBytes], at); err != nil {
			return finding{}, err
		}
	}
	rate := float64(at) / 1e6 / time.Since(began).Seconds()
	v := streamBars.judge(rate)
	return finding{
		Check: "sequential read", Verdict: v, Measured: fmt.Sprintf("%.0f MB/s", rate),
		Meaning: advice{
			pass: "scans, backups and recovery will be fast",
			warn: "scans of data that is not in memory, backups and recovery will take their time",
			fail: "too slow for data larger than memory: recovery and backups will take very long",
		}.of(v) + p.cached(),
	}, nil
}

// scattered reads pages from all over the file, one at a time, as point reads of what is not in memory do.
func (p *probe) scattered() (finding, error) {
	h, err := timed(p.length, func() error {
		_, err := p.file.ReadAt(p.buffer[:randomBytes], p.random.Int64N(p.bytes/randomBytes)*randomBytes)
		return err
	})
	if err != nil {
		return finding{}, err
	}
	f := judgeLatency("random read", h, randomBars, advice{
		pass: "reads of what is not in memory will be fast",
		warn: "reads of what is not in memory will be slow: give the server more --memory, or a faster disk",
		fail: "only data that fits into memory will be served well from this disk",
	})
	f.Meaning += p.cached()
	return f, nil
}
