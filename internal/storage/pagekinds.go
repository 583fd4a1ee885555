package storage

// PageKinds counts the pages of the newest state by what they hold. They add up to what Pages.Live
// says.
type PageKinds struct {
	Tree             uint64 // leaves and inner nodes
	Blob             uint64 // packed large values
	Overflow         uint64 // whole pages of single values
	IndirectionTable uint64
	AllocationMap    uint64 // the allocation map, the superblocks and their copies
}

// Kinds tells the pages in use apart, at no cost.
func (s *Stats) Kinds() PageKinds {
	k := PageKinds{Blob: s.Blobs.BlobPages, Overflow: s.Blobs.OverflowPages, IndirectionTable: s.Blobs.TablePages, AllocationMap: s.Pages.MapPages + s.Pages.SuperPages}
	k.Tree = s.Pages.Live - min(s.Pages.Live, k.Blob+k.Overflow+k.IndirectionTable+k.AllocationMap) // read a moment apart
	return k
}

// WriteAmplification is how many bytes were written to log and data file since Open for each byte
// that came in: of log records, and of bulk loads, which are in no record. Zero before the first.
func (s *Stats) WriteAmplification() float64 {
	in := float64(s.Log.Bytes) + float64(s.BulkLoads.Bytes)
	if in == 0 {
		return 0
	}
	return (float64(s.Log.Bytes) + float64(s.Pages.PagesWritten)*float64(s.PageSize)) / in
}
