"""What a program on a terminal needs: arguments, display, documents, interrupts."""
