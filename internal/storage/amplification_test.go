package storage

import "testing"

func TestWriteAmplificationCountsBulkLoads(t *testing.T) {
	s := Stats{PageSize: 8192}
	if a := s.WriteAmplification(); a != 0 {
		t.Errorf("of nothing: %v", a)
	}
	s.Log.Bytes, s.Pages.PagesWritten = 8192, 3
	if a := s.WriteAmplification(); a != 4 {
		t.Errorf("of a log and three pages: %v", a)
	}
	s.Log.Bytes, s.BulkLoads.Bytes, s.Pages.PagesWritten = 72, 1<<30, 1<<30/8192*11/10
	if a := s.WriteAmplification(); a < 1 || a > 1.2 {
		t.Errorf("of a bulk load into pages that it nearly fills: %v", a)
	}
}
