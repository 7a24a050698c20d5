"""``trtl-rl report``: one HTML file and PNG plots of one run or several."""
