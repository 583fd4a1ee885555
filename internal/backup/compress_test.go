package backup

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// TestFramesOfAnyContentComeBack: compressible, random, in part random, text, of any length; several goroutines at once make the same bytes.
func TestFramesOfAnyContentComeBack(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	random := make([]byte, frameBytes)
	for i := range random {
		random[i] = byte(rng.Uint32())
	}
	mixed := bytes.Clone(random)
	for i := 0; i < len(mixed); i += 1000 {
		clear(mixed[i:min(i+500, len(mixed))])
	}
	text := []byte(strings.Repeat("name=value; another name=another value; ", frameBytes/40+1))[:frameBytes]
	c := newCompressor(2)
	d, err := newDecompressor()
	check(t, err)
	defer d.close()
	for kind, content := range map[codec][]byte{codecNone: random, codecS2: mixed, codecZstd: text} {
		for _, n := range []int{1, 2, 511, 4096, sampleBytes - 1, sampleBytes, sampleBytes + 1, frameBytes} {
			if n == frameBytes && kind == codecZstd {
				continue // S2 makes as little of one that is repeated
			}
			var made [2][]byte
			var both sync.WaitGroup
			for i := range made {
				both.Go(func() { made[i] = c.frame(content[:n]) })
			}
			both.Wait()
			if !bytes.Equal(made[0], made[1]) {
				t.Fatalf("%d bytes, codec %d: the same content gave other bytes", n, kind)
			}
			f, rest, err := nextFrame(made[0], partVersion)
			check(t, err)
			got, err := f.decompress(d, make([]byte, 0, frameBytes))
			check(t, err)
			if !bytes.Equal(got, content[:n]) || len(rest) > 0 || len(f.stored) > n {
				t.Fatalf("%d bytes, codec %d: %d bytes came back of %d", n, f.codec, len(got), len(f.stored))
			}
			if n == frameBytes && f.codec != kind {
				t.Errorf("codec %d, want %d", f.codec, kind)
			}
		}
	}
}

// TestPartsEndAtBoundariesWithoutAPage: the page at a multiple of the size of parts may be free. The part ends there nevertheless.
func TestPartsEndAtBoundariesWithoutAPage(t *testing.T) {
	j := &job{store: new(sink), manifest: new(Manifest), pin: new(countingPin)}
	s := newSender(t.Context(), j)
	a := newAssembler(s, partPages, 512, Options{PartBytes: 8 * 512})
	for id := page.ID(2); id < 30; id++ {
		if id == 8 || id == 16 || id == 17 {
			continue
		}
		check(t, a.boundary(id))
		a.add(id, a.room(1))
		check(t, a.full())
	}
	check(t, a.finish())
	check(t, s.close())
	if p := j.manifest.Parts; len(p) != 4 || p[0].Last != 7 || p[1].First != 9 || p[1].Last != 15 || p[2].First != 18 {
		t.Fatalf("parts %+v", p)
	}
}

// FuzzFrame reads arbitrary bytes as the frames of a part: no panic, and no memory out of proportion.
func FuzzFrame(f *testing.F) {
	c := newCompressor(1)
	for _, content := range sampleContents() {
		f.Add(c.frame(content), uint32(0))
	}
	f.Add([]byte{4, 0, 0, 0, 1, 0, 0, 0}, uint32(codecS2))
	d, err := newDecompressor()
	if err != nil {
		f.Fatal(err)
	}
	buf := make([]byte, 0, frameBytes)
	f.Fuzz(func(t *testing.T, p []byte, kind uint32) {
		for _, version := range []uint32{partVersionOld, partVersion} {
			if version == partVersion && len(p) >= frameHeader { // a checksum that fits, so that what is stored is decompressed
				p = bytes.Clone(p)
				binary.LittleEndian.PutUint32(p[offFrameCodec:], kind%4)
				binary.LittleEndian.PutUint32(p[offFrameStored:], uint32(len(p)-frameHeader))
				binary.LittleEndian.PutUint32(p[offFrameCRC:], frameSum(p, p[frameHeader:]))
			}
			one, _, err := nextFrame(p, version)
			if err != nil {
				continue
			}
			if content, err := one.decompress(d, buf); err == nil && len(content) > frameBytes {
				t.Fatalf("%d bytes", len(content))
			}
		}
	})
}
