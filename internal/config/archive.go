package config

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// Archive is the log archive.
type Archive struct {
	URL       string        // where it is; empty: there is none
	Interval  time.Duration // after which what was committed is uploaded
	FileSize  Size          // at which a file is uploaded sooner
	Merge     bool          // small files are merged into larger ones
	OnLowDisk ArchiveOnLowDisk
	Drill     time.Duration // between two restores of the newest state into DrillDir; 0: never
	DrillDir  string
}

// ArchiveOnLowDisk says what becomes of log that is not archived when the disk is full. It is a flag value.
type ArchiveOnLowDisk string

// What becomes of it.
const (
	ArchiveGap  ArchiveOnLowDisk = "gap"  // it is given up, and the archive has a gap
	ArchiveStop ArchiveOnLowDisk = "stop" // it is kept, and writes are refused
)

const (
	archiveIntervalMin = 100 * time.Millisecond
	archiveFileSizeMin = 64 * KiB
	archiveFileSizeMax = GiB
)

// DrillMemory is the memory of the store that a drill restores. A large record is not in it: the drill has that twice, as it is read and in a memtable.
const DrillMemory = 64 * MiB

// memory is what the archiver and drills take beside the rest of the bound. The archiver has a file that may have become full with the largest record,
// and that record once more.
func (a *Archive) memory(record Size) Size {
	if a.URL == "" {
		return 0
	}
	bytes := a.FileSize + 2*record
	if a.Drill != 0 {
		bytes += DrillMemory + 2*record
	}
	return bytes
}

func (a *Archive) flags(f *pflag.FlagSet) {
	f.StringVar(&a.URL, "archive", a.URL, "where the log is archived, for restores to any time: a directory or s3://BUCKET/PREFIX; empty is nowhere")
	f.DurationVar(&a.Interval, "archive-interval", a.Interval, "longest time until a commit is uploaded to the archive")
	f.Var(&a.FileSize, "archive-file-size", "size at which a file is uploaded sooner; the archiver takes as much memory beside --memory, and twice the largest batch while it archives that")
	f.BoolVar(&a.Merge, "archive-merge", a.Merge, "merge small files of the archive into files of up to 64 MiB, and delete the small ones an hour later; false for a target that does not let objects be deleted")
	f.Var((*choice)(&a.OnLowDisk), "archive-on-low-disk", "what becomes of log that is not archived when the disk is full: gap gives it up, with a gap in the archive; stop keeps it, and writes are refused")
	f.DurationVar(&a.Drill, "restore-drill", a.Drill, "how often the newest state of the archive is restored into a scratch directory, verified and removed, to prove that it can be; 0 is never")
	f.StringVar(&a.DrillDir, "restore-drill-dir", a.DrillDir, "directory in which --restore-drill makes its scratch directory, which needs as much room as the store")
}

func (a *Archive) validate(v *validation) {
	v.duration("archive-interval", a.Interval, archiveIntervalMin, 24*time.Hour)
	v.size("archive-file-size", a.FileSize, archiveFileSizeMin, archiveFileSizeMax)
	v.duration("restore-drill", a.Drill, 0, 366*24*time.Hour)
	v.check(a.Drill == 0 || a.URL != "" && a.DrillDir != "", "restore-drill", "needs --archive and --restore-drill-dir")
	bucket, s3 := strings.CutPrefix(a.URL, "s3://")
	bucket, _, _ = strings.Cut(bucket, "/")
	v.check(!s3 || !strings.ContainsAny(bucket, ":@"), "archive", "has a bucket with : or @; write s3://BUCKET/PREFIX, and credentials into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
	v.check(a.OnLowDisk == ArchiveGap || a.OnLowDisk == ArchiveStop, "archive-on-low-disk", fmt.Sprintf("is %q; choose gap or stop", string(a.OnLowDisk)))
}
